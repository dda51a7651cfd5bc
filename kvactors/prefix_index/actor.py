"""PrefixIndex: finds cached prefixes of requests and gives requests device blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count, islice
from typing import Any, ClassVar, get_args

import msgspec
import numpy as np

from kvactors.actor import Actor, ActorRef, Envelope, Message, PeerRestarted, on
from kvactors.cpu_evictor.messages import (
    HostBlocksAdded,
    HostBlocksRemoved,
    HostCleared,
    HostRequest,
    LayersLoaded,
    Loaded,
    LoadStalled,
    Offloaded,
    PrefetchToHost,
    Saved,
)
from kvactors.errors import (
    CacheAsleep,
    DeviceError,
    LeaseBusy,
    LeaseEnded,
    LeasesOpen,
    NoRoom,
    NumBlocksUnset,
    RankLost,
    TokensCommitted,
    ensure,
)
from kvactors.fetch_cost import PrefillRate
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    NamespaceChanged,
    PathCached,
    Report,
    TierCleared,
)
from kvactors.gpu_swapper.messages import CopiedWithin, CopyWithin, DataPlaneStatus
from kvactors.identity import PLAIN, RequestScope, leading_items
from kvactors.native import HOST, BlockTree, Path
from kvactors.prefix_index.host import Evictions, SavedPath, SaveTable, TreeClears
from kvactors.prefix_index.leases import LeaseState, LeaseTable
from kvactors.prefix_index.loads import LoadTable
from kvactors.prefix_index.messages import (
    Abandon,
    Ack,
    Acquire,
    AcquireResult,
    ChangeShares,
    Clear,
    Commit,
    DropLeading,
    Extend,
    Finish,
    Fork,
    ForkedLease,
    ForkResult,
    LayerReady,
    LoadDeadline,
    Pause,
    Preempt,
    Prefetch,
    Proceed,
    Ready,
    Reserve,
    Resume,
    SetNamespace,
    SetNumBlocks,
    SetQuota,
    StepLeases,
    StepResult,
    Truncate,
    Withdrawn,
)
from kvactors.prefix_index.pins import PinExpired, Pins
from kvactors.prefix_index.reports import Announcements, IndexStatistics
from kvactors.prefix_index.settings import IndexSettings, Roots
from kvactors.prefix_index.tree import BlockIndex, Match, pick_hashes, was_cleared
from kvactors.prefix_index.waiting import TURN_REQUESTS, AdmissionDeadline, Line, Wait, WaitQueue
from kvactors.prefix_index.work import IndexEffects, NextSlice, Work, hash_first, slices
from kvactors.quotas import salt_id
from kvactors.types import Reason


class TailCopy(msgspec.Struct, eq=False):
    """The copies, for forks, of one last block that is not full. They own their blocks until they
    end."""

    source: int
    targets: tuple[int, ...]
    forks: list[LeaseState]
    envelope: Envelope[ForkResult]


class PrefixIndex(Actor):
    """Owns the block tree, the device blocks, their LRU order and the leases.

    A request is matched and granted in one turn. Blocks that are pinned stay on the device, and
    blocks that are reserved are not given to others, so requests take nothing from those that wait.
    """

    ROLE: ClassVar[str] = "prefix_index"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": get_args(HostRequest),
        "gpu_swapper": (CopyWithin,),
        "flush_notifier": (PathCached, BlocksAdded, BlocksRemoved, TierCleared, NamespaceChanged),
    }

    def __init__(
        self,
        ref: ActorRef,
        *,
        index: BlockIndex,
        evictor: ActorRef[HostRequest],
        swapper: ActorRef[CopyWithin],
        notifier: ActorRef[Report],
        roots: Roots,
        settings: IndexSettings,
    ) -> None:
        super().__init__(ref)
        self._ops = ops = count(1)
        self.index, self.roots, self.settings = index, roots, settings
        self.out = out = IndexEffects(self.context, evictor, swapper, notifier)
        self.prefill = PrefillRate(settings.prefill_tokens_per_s)
        # Each of these depends only on those made before it.
        self.clears = TreeClears(out, ops)
        self.announcements = Announcements(index, out, roots, settings)
        self.evictions = Evictions(self, ops)
        self.leases = LeaseTable(self)
        self.loads = LoadTable(self, ops)
        self.saves = SaveTable(self, ops)
        self.pins = Pins(self)
        self.queue = WaitQueue(self)
        self.copies: dict[int, TailCopy] = {}  # for forks, in flight, by operation
        self.tails = 0  # blocks copied for forks

    def set_root(self, path: Path, scope: RequestScope) -> bool:
        """Start a path from the root hash of the present namespace. Returns whether it did not."""
        root = self.roots.root(scope)
        changed = path.root != root
        if changed:
            path.set_root(root)
        if scope.salt is not None:
            path.salt = number = salt_id(scope.salt)
            self.index.policy.quotas.counts.see(number, scope.salt)
        self.announcements.remember(root, scope)
        return changed

    # -- acquire

    @on(Acquire)
    def acquire(self, message: Acquire, envelope: Envelope[AcquireResult]) -> None:
        """Match, pin and take blocks: now, once enough of them are free, or after a pause."""
        queue, index, path, pool = self.queue, self.index, message.path, self.index.pool
        quiet = not queue.contended or queue.is_quiet()
        if quiet and not (message.chunk_tokens or message.media):
            if message.scope is not PLAIN or self.announcements.latest is not self.roots.plain:
                self.set_root(path, message.scope)
            policy, tokens, tree = index.policy, path.num_tokens, index.tree
            needed = -(-tokens // index.block_size)
            limit, fetch = (tokens - index.recompute_tokens) // index.block_size, 0
            if message.most is not None:
                limit = min(limit, message.most)
            if self.settings.fetch:
                fetch = min(limit, self.settings.fetchable(path, message.stored))
            if needed:
                # Every cached block is on the device, and others are free, or are evicted at once.
                free = pool.free - index.reserved
                evict = free < needed <= index.turn_blocks and not queue.free_low
                evict = evict and self.evictions.at_once
                root = self.announcements.latest
                now = 0.0 if policy.tables is None else policy.now()
                run = tree.pin_resident(path, root, limit, fetch, needed, free, evict, now)
                if run >= 0:
                    if needed - run > free:
                        self.evictions.drop(needed - run - free, path.salt, needed - run)
                    table = path.complete(run, index.take(needed - run))
                    self._granted(self._new_lease(message, run, run), envelope, table)
                    return
        if queue.asleep:
            self.out.refuse(envelope, CacheAsleep())
        elif queue.paused or queue.held.waits:
            queue.hold(envelope)
        else:
            self._admit(message, envelope)

    def _new_lease(self, message: Acquire, device_hits: int, expected_blocks: int) -> LeaseState:
        return LeaseState(
            message.lease,
            message.request_id,
            message.path,
            self.index.tree,
            message.deadline,
            message.media,
            message.hints,
            device_hits,
            expected_blocks,
        )

    def _admit(self, message: Acquire, envelope: Envelope[AcquireResult]) -> None:
        """Admit a request, before those that wait for room if it fits and may overtake them."""
        queue = self.queue
        self.set_root(message.path, message.scope)
        needed = self.index.blocks_for(message.path.num_tokens)
        wanted = (message.path, needed, message.deadline, message.media)
        if queue.refuse_unreachable(envelope, *wanted):
            return
        heads = queue.heads()
        if heads:
            claims = queue.forks.claims + queue.acquires.claims + needed
            if claims > queue.spare(heads) or not self._fits(message):
                if message.wait_for_room:
                    queue.wait_for_room(envelope)
                else:
                    first = "requests that wait for room come first"
                    queue.refuse(envelope, NoRoom(needed, 0, self.index.tree.pinned, first))
                return
            queue.overtakings += 1
        self._match(envelope)

    def _fits(self, message: Acquire | Fork) -> bool:
        """Whether a request that holds nothing, or the copies of a fork, can have blocks now."""
        if isinstance(message, Fork):
            return self.index.available >= len(message.leases)
        path, index, media = message.path, self.index, message.media
        self.set_root(path, message.scope)
        fetch = self.settings.fetchable(path, message.stored)
        chunk, most = message.chunk_tokens, message.most
        needed = index.needed_blocks(path, chunk, fetch=fetch, media=media, most=most)
        return index.fits(path, needed, media, most)

    def _match(self, envelope: Envelope[AcquireResult]) -> None:
        """Match a request and give it its blocks, or let it wait."""
        message: Any = envelope.message
        path, index, queue = message.path, self.index, self.queue
        tree, settings, media = index.tree, self.settings, message.media
        fetch, chunk = settings.fetchable(path, message.stored), message.chunk_tokens
        most = message.most
        needed = index.needed_blocks(path, chunk, fetch=fetch, media=media, most=most)
        if index.free < needed and not (queue.releasing or index.can_fit(path, needed, most)):
            queue.lacks_room(envelope, needed)
            return
        index.policy.advance(tree)
        # A request that is refused in the end must not count hits or keep blocks that leave for
        # others: requests that try again would keep each other's victims and never be granted.
        used = not queue.waiting and index.free >= needed
        match = index.match(path, fetch=fetch, media=media, chunk=chunk, used=used, most=most)
        lease = self._new_lease(message, match.num_device_blocks, match.expected_blocks)
        if not queue.waiting and index.free >= match.new_blocks:
            if not used:
                tree.keep(path)
            self._grant(lease, match, envelope, index.take(match.new_blocks))
            return
        # Without an offload no copy has to be waited for: many blocks are evicted in later turns.
        many = needed > index.turn_blocks and not settings.offload
        may_wait = message.wait or message.wait_for_room or many
        if may_wait:
            self.loads.begin(lease, match.segments, placed=False)
        wait = Wait(
            lease.id,
            envelope,
            needed=match.new_blocks,
            salt=path.salt,
            complete=partial(self._grant_late, lease, match, envelope),
            give_up=partial(self._drop, lease),
        )
        queue.request(wait, may_wait=may_wait, deadline=message.deadline)
        if queue.waiting.get(message.lease) is wait:
            tree.keep(path, used=False)

    def _grant(
        self, lease: LeaseState, match: Match, envelope: Envelope[AcquireResult], blocks: list[int]
    ) -> None:
        """Enter the new blocks of a request into its table."""
        self.index.fill_table(lease.path, match, blocks)
        self.loads.begin(lease, match.segments, placed=True)
        self._granted(lease, envelope, lease.path.table())

    def _grant_late(
        self, lease: LeaseState, match: Match, envelope: Envelope[AcquireResult]
    ) -> None:
        """The new blocks of a request that waited are free. The cached part of its path or its
        namespace may have changed: match it again, and continue with the loads sent ahead only if
        nothing has."""
        message: Any = envelope.message
        before, index, path = lease.tree, self.index, lease.path
        # The table may hold new blocks in place of a shared load that was not completed.
        index.pool.give(before.release(path))
        lease.fault = None
        lease.tree = index.tree
        changed = self.set_root(path, message.scope)
        fetch = self.settings.fetchable(path, message.stored)
        index.policy.advance(index.tree)
        chunk, most = message.chunk_tokens, message.most
        again = index.match(path, fetch=fetch, media=lease.media, chunk=chunk, most=most)
        same_loads = len(lease.loads) == len(match.segments)
        if not changed and again == match and lease.tree is before and same_loads:
            index.fill_table(path, match, index.take(match.new_blocks))
            self.loads.place(lease)
            self._granted(lease, envelope, path.table())
            return
        self.loads.cancel(lease, 0)
        self._detach(lease)
        # Blocks whose loads have completed since are on the device now.
        lease.device_hits, lease.host_hits, lease.storage_hits = again.num_device_blocks, 0, 0
        lease.expected_blocks = again.expected_blocks
        self.evictions.drop_until(again.new_blocks, path.salt)  # a clear may have removed hits
        if again.new_blocks > index.free:
            self._drop(lease)
            self.queue.lacks_room(envelope, again.new_blocks - match.new_blocks)
            return
        self._grant(lease, again, envelope, index.take(again.new_blocks))

    def _granted(
        self, lease: LeaseState, envelope: Envelope[AcquireResult], table: Sequence[int]
    ) -> None:
        index, expected = self.index, lease.expected_blocks
        self.leases.grant(lease)
        if index.ages is not None and lease.device_hits:
            index.ages.matched(lease.path.blocks(0, lease.device_hits))
        if lease.media:
            expected = index.before_media(lease.expected_blocks, lease.media)
        cached, pending = expected * index.block_size, bool(lease.loads)
        result = AcquireResult(table, cached, pending, lease.device_hits)
        if not self.out.reply(envelope, result):
            self._give_back(lease)
        elif self.queue.free_low:
            self.queue.evict_to_watermark()

    @on(Prefetch)
    def prefetch(self, message: Prefetch, envelope: Envelope[Ack]) -> None:
        """Ask the host tier to fetch the blocks that the device lacks."""
        path, index = message.path, self.index
        if not index.pool.total or self.queue.asleep:
            self.out.refuse(envelope, CacheAsleep() if index.pool.total else NumBlocksUnset())
            return
        self.set_root(path, message.scope)
        limit = index.limit_of(path.num_tokens)
        limit = min(limit, self.settings.fetchable(path, message.stored))
        start, states = index.tree.peek(path, limit)
        wanted = max(0, limit - start)
        if wanted:
            lineages = self.announcements.lineages_of_path(path, 0, limit)
            hashes, deadline = path.hashes(0, limit), message.deadline
            held = sum(1 for state in states[:wanted] if state & HOST)
            self.evictions.name_host_victims(wanted - held)
            self.out.to_evictor(
                PrefetchToHost(path.root, hashes, start, deadline, lineages, path.salt)
            )
        self.out.reply(envelope, Ack(wanted))

    # -- requests that wait

    def admit_waiting(self) -> None:
        """Admit a turn's share of the requests that wait, those of a pause last."""
        self._admit_room()
        queue, held = self.queue, self.queue.held
        for _ in range(TURN_REQUESTS):
            if queue.paused or queue.asleep or not held.waits:
                return
            wait = held.remove(next(iter(held.waits)))
            if wait is not None and not wait.envelope.abandoned:
                self._admit(wait.message, wait.envelope)
        if held.waits:
            queue.proceed_later()

    def _admit_room(self) -> None:
        """Look at the first requests that wait for room, and admit those that fit, unless they
        would overtake others too often."""
        queue, heads = self.queue, list[Wait]()
        lines = (queue.forks, queue.acquires)
        before, claims, spare = sum(map(len, lines)), 0, queue.spare(heads)
        for line in lines:
            head: Wait | None = None
            for wait in list(islice(line.waits.values(), TURN_REQUESTS)):
                message = wait.message
                if wait.envelope.abandoned:
                    if line.remove(wait.lease) is not None:
                        self.out.refuse(wait.envelope, LeaseEnded("this request was given up"))
                    continue
                if line is queue.acquires and queue.paused:
                    return
                if claims + wait.claim <= spare and self._fits(message):
                    queue.overtakings += bool(heads)
                    self._retry(line, wait)
                    spare = queue.spare(heads)
                if wait.lease not in line.waits:
                    continue
                if head is None:
                    head = wait
                    heads.append(head)
                    spare = queue.spare(heads)
                claims += wait.claim
                if claims >= spare:
                    break  # no later request may overtake
        if TURN_REQUESTS < sum(map(len, lines)) < before:
            queue.proceed_later()

    def _retry(self, line: Line, wait: Wait) -> None:
        """Admit a request that waited for room. It has its place again if it does not fit."""
        line.remove(wait.lease)
        if isinstance(wait.message, Fork):
            self._fork(wait.message, wait.envelope, None)
        else:
            self._match(wait.envelope)
        if (again := line.waits.get(wait.lease)) is not None:
            again.since = wait.since

    @on(Withdrawn)
    def withdrawn(self, message: Withdrawn) -> None:
        """The call may have been answered before it was cancelled."""
        call = self.queue.call_of(message.lease)
        if call is not None and call.abandoned:
            self.queue.cancel(message.lease, "this call was cancelled")
            self.queue.serve()

    @on(AdmissionDeadline)
    def admission_deadline(self, message: AdmissionDeadline) -> None:
        self.queue.expire(message.wait)

    @on(Proceed)
    def proceed(self, message: Proceed) -> None:
        self.queue.proceed()
        self.admit_waiting()

    @on(NextSlice)
    def continue_work(self, message: NextSlice) -> None:
        self.out.works -= 1
        self.out.begin(message.work)

    # -- growth of leases

    # A reserved block of a lease is a private one beyond those that its tokens need. The next
    # tokens use it, and the end of the lease gives it back like any other private block.

    def grow(self, message: Extend | Reserve, envelope: Envelope[AcquireResult]) -> None:
        """Append tokens to a lease, with the blocks that it lacks, or blocks for later tokens."""
        lease = self.leases.get(message.lease) or self.leases.find(message.lease, envelope)
        if lease is None:
            return
        path, index, queue = lease.path, self.index, self.queue
        total = -(-message.num_tokens // index.block_size)
        needed = max(0, total - path.num_blocks)
        idle = not queue.contended and lease.fault is None and message.position == path.num_tokens
        if idle and (not needed or needed <= index.free):
            self._grow(path, message, envelope, index.take(needed) if needed else [])
            return
        error = self._busy(lease, message.position)
        if error is not None:
            self.out.refuse(envelope, error)
            return
        if needed and queue.refuse_unreachable(envelope, path, total, lease.deadline):
            return

        def complete() -> None:
            self._grow(path, message, envelope, index.take(needed))

        wait = Wait(lease.id, envelope, needed=needed, salt=path.salt, complete=complete)
        self._take(wait, lease.deadline)

    extend = on(Extend)(grow)
    reserve = on(Reserve)(grow)

    def _grow(
        self,
        path: Path,
        message: Extend | Reserve,
        envelope: Envelope[AcquireResult],
        blocks: list[int],
    ) -> None:
        """Enter the tokens and the new blocks of a message."""
        if isinstance(message, Extend):
            path.append(message.added)
            for block, extra in message.extras:
                path.set_extra(block, path.extra_key(block) + extra)
        if blocks:
            path.assign(path.num_blocks, blocks)
        self.out.reply(envelope, AcquireResult(tuple(blocks), 0, False, 0))

    def _busy(self, lease: LeaseState, position: int) -> Exception | None:
        """Why the table of a lease cannot be changed now. position: see `Extend`."""
        if lease.fault is not None and lease.fault.func is RankLost:
            return lease.fault()
        call = self.queue.call_of(lease.id)
        if call is not None and call.abandoned:
            self.queue.cancel(lease.id, "this call was cancelled")
            call = None
        if call is None and position == lease.path.num_tokens:
            return None
        return LeaseBusy(
            f"the lease of {lease.request_id!r} has {lease.path.num_tokens} tokens, or is being "
            "extended"
        )

    def _take(self, wait: Wait, lease_deadline: float, *, may_wait: bool = True) -> None:
        """Give a request of a lease its blocks, or let it wait for them."""
        if not wait.needed:
            wait.complete()
            return
        deadline = wait.envelope.deadline
        deadline = lease_deadline if deadline is None else deadline
        self.queue.request(wait, may_wait=may_wait, deadline=deadline)

    @on(Truncate)
    def truncate(self, message: Truncate, envelope: Envelope[Ack]) -> None:
        lease, kept = self.leases.find(message.lease, envelope), message.num_tokens
        if lease is None:
            return
        error = self._busy(lease, message.position) or self._keeps(lease, kept)
        if error is not None:
            self.out.refuse(envelope, error)
            return
        path, (full, rest) = lease.path, divmod(kept, self.index.block_size)
        extra = leading_items(path.extra_key(full), rest) if rest else b""
        self._keep_late_loads(path)
        freed = lease.tree.truncate(path, kept, extra)
        lease.media = tuple(item for item in lease.media if item[0] < kept)
        self.out.reply(envelope, Ack(path.num_blocks))
        if freed:
            self.index.pool.give(freed)
            self.queue.serve()

    @on(DropLeading)
    def drop_leading(self, message: DropLeading, envelope: Envelope[Ack]) -> None:
        lease, size = self.leases.find(message.lease, envelope), self.index.block_size
        if lease is None:
            return
        error = self._busy(lease, message.position)
        if error is None and lease.loads:
            error = lease.not_ready("commit")
        if error is not None:
            self.out.refuse(envelope, error)
            return
        self._keep_late_loads(lease.path)
        if not was_cleared(lease.tree, lease.path):
            leading = min(message.blocks, lease.path.num_committed)
            if self.announcements.enabled:
                self.announcements.finished(lease.tree, lease.path, 0, leading)
            if self.saves.enabled:
                self._save_leading(lease, leading)
        self.index.pool.give(lease.tree.drop_leading(lease.path, message.blocks))
        lease.expected_blocks = max(0, lease.expected_blocks - message.blocks)
        lease.prompt_tokens = max(0, lease.prompt_tokens - message.blocks * size)
        self.out.reply(envelope, Ack(lease.path.num_blocks))
        self.queue.serve()

    def _save_leading(self, lease: LeaseState, blocks: int) -> None:
        """Save the first blocks of a path that is going to drop them: the end of its lease saves
        only blocks that it still has."""
        tree, path = lease.tree, copy_of(lease.path, blocks)
        run, _ = tree.pin(path, blocks, False)  # not a use, which the policy would count
        saved = SavedPath(tree, path, 1)
        if run:
            self.saves.start(saved, 0, run)
        if saved.answered():
            self.index.release(tree, path)

    def _keep_late_loads(self, path: Path) -> None:
        """The tokens of a path change. A late load, which the lease continues without, still
        reports its blocks by the tokens that they were loaded for."""
        for load in self.index.loading.values():
            if load.path is path:
                load.path = copy_of(path, load.stop)

    def _keeps(self, lease: LeaseState, kept: int) -> Exception | None:
        """Why a lease cannot be cut to so many tokens."""
        if lease.loads:
            return lease.not_ready("truncate")
        if lease.fault is not None:
            return lease.fault()
        committed = lease.path.num_committed * self.index.block_size
        if kept < committed:
            return TokensCommitted(
                f"num_tokens is {kept}, but the first {committed} tokens are committed: other "
                "requests may share their blocks"
            )
        full, rest = divmod(kept, self.index.block_size)
        if rest and full < min(lease.path.num_full_blocks, lease.path.num_blocks):
            block = lease.path.blocks(full, full + 1)[0]
            if self.index.pool.owners(block) > 1:
                return TokensCommitted(
                    f"num_tokens is {kept}, within a full block that {lease.request_id!r} shares "
                    f"with a fork: truncate to a multiple of {self.index.block_size}, or before "
                    "the fork"
                )
        return None

    # -- forks

    # A fork references the same nodes of the tree and waits for the same loads. Full blocks that
    # are not committed get a further owner in the pool: the tokens of a full block do not change,
    # so every lease that computes it writes the same bytes. The last block is written by both
    # leases if it is not full, so the fork gets a copy of it before either of them can continue.

    @on(Fork)
    def fork(self, message: Fork, envelope: Envelope[ForkResult]) -> None:
        self._fork(message, envelope, self.queue.forks.first)

    def _fork(self, message: Fork, envelope: Envelope[ForkResult], head: Wait | None) -> None:
        """Make leases of the tokens of a lease. head: the fork that has waited longest, None for
        one that has waited itself."""
        lease, queue = self.leases.find(message.lease, envelope), self.queue
        if lease is None:
            return
        error = self._busy(lease, message.position)
        if error is None and lease.fault is not None:
            error = lease.fault()
        if error is not None:
            self.out.refuse(envelope, error)
            return
        needed = len(message.leases) if tail_of(lease.path) >= 0 else 0
        claim = lease.path.num_blocks + needed
        if needed and queue.refuse_unreachable(envelope, lease.path, claim, message.deadline):
            return
        if needed and head is not None:
            claims = queue.forks.claims + claim
            if claims > queue.spare([head]) or self.index.available < needed:
                queue.lacks_room(envelope, needed)
                return
            queue.overtakings += 1
        wait = Wait(
            lease.id,
            envelope,
            needed=needed,
            salt=lease.path.salt,
            complete=partial(self._make_forks, lease, message, envelope, needed),
        )
        self._take(wait, lease.deadline, may_wait=message.wait or message.wait_for_room)

    def _make_forks(
        self, lease: LeaseState, message: Fork, envelope: Envelope[ForkResult], needed: int
    ) -> None:
        index = self.index
        if lease.fault is not None:  # since it began to wait
            self.out.refuse(envelope, lease.fault())
            return
        index.policy.advance(lease.tree)
        forks = [
            self._make_fork(lease, number, request_id)
            for number, request_id in zip(message.leases, message.request_ids, strict=True)
        ]
        if not needed:
            self._answer_fork(forks, envelope)
            return
        blocks = index.take(needed)
        for fork, block in zip(forks, blocks, strict=True):
            fork.path.assign(fork.path.num_blocks, [block])
        copy = TailCopy(tail_of(lease.path), tuple(blocks), forks, envelope)
        index.pool.share((copy.source, *copy.targets))
        self.tails += needed
        index.closing += 1
        op = next(self._ops)
        self.copies[op] = copy
        sources = (copy.source,) * needed
        self.out.to_swapper(CopyWithin(op, sources, copy.targets, index.memory_generation))

    def _make_fork(self, lease: LeaseState, number: int, request_id: str) -> LeaseState:
        """A lease of the same tokens, without a block for a last one that is not full."""
        path, loads = empty_like(lease.path), list(lease.loads)
        self.index.pool.share(lease.tree.fork(lease.path, path))
        new = {"id": number, "request_id": request_id, "path": path}
        fork = msgspec.structs.replace(lease, **new, loads=loads, waits=[], counted=False)
        self.leases.add_fork(fork)
        return fork

    @on(CopiedWithin)
    def copied(self, message: CopiedWithin) -> None:
        """Copies for a fork have ended, some of them maybe without their bytes."""
        copy = self.copies.pop(message.op, None)
        if copy is None:
            return
        self.index.closing -= 1
        self.index.pool.give((copy.source, *copy.targets))
        if not message.failed:
            self._answer_fork(copy.forks, copy.envelope)
            self.queue.serve()
            return
        error = DeviceError("the last block could not be copied for the fork: nothing was changed")
        self._give_back_forks(copy.forks)
        self.out.refuse(copy.envelope, error)

    def _answer_fork(self, forks: list[LeaseState], envelope: Envelope[ForkResult]) -> None:
        """The leases can be used, unless the caller has gone or device memory was lost."""
        lost = next((fork.fault for fork in forks if fork.fault is not None), None)
        if lost is not None and lost.func is RankLost:
            self._give_back_forks(forks)
            self.out.refuse(envelope, lost())
            return
        made = (ForkedLease(one.path, self.leases.result(one), bool(one.loads)) for one in forks)
        if not self.out.reply(envelope, ForkResult(tuple(made))):
            self._give_back_forks(forks)

    def _give_back_forks(self, forks: list[LeaseState]) -> None:
        """End the leases, without those that have ended."""
        for fork in forks:
            if self.leases.get(fork.id) is fork:
                self._give_back(fork)
        self.queue.serve()

    # -- decode steps

    @on(StepLeases)
    def step(self, message: StepLeases, envelope: Envelope[StepResult]) -> None:
        """Extend and commit many leases, as far as blocks are free or can be evicted at once. A
        lease that needs more is left to a separate commit and extend, so that a step waits for
        nothing. Quotas are by lease: with them, blocks are evicted for such an extend alone."""
        index, queue = self.index, self.queue
        leases = list(map(self.leases.get, message.leases))
        if queue.waiting or queue.forks.waits:
            leases = [None if one is None or queue.call_of(one.id) else one for one in leases]
        paths = [
            None if lease is None or lease.fault is not None or lease.loads else lease.path
            for lease in leases
        ]
        trees = [None if lease is None else lease.tree for lease in leases]

        def take(count: int) -> list[int]:
            lacking = count - index.free - index.unpromised
            if lacking > 0:
                self.evictions.evict(lacking)
            return index.take(min(count, index.free))

        free = 0 if queue.waiting else index.free  # the requests that wait get them first
        if free < len(paths) and not (queue.waiting or index.tree.sharing):
            free += index.evictable()
        committed, grown, commits, unused = message.tokens.step(
            message.first,
            paths,
            trees,
            message.positions,
            message.computed,
            free,
            index.turn_blocks,
            take,
        )
        if unused:
            index.pool.give(unused)
        for path, start, stop, adopted in commits:
            self._entered(path, start, stop, adopted)
        if self.leases.prefilling:
            for lease in tuple(self.leases.prefilling.values()):
                self.leases.measure(lease)
        self.out.reply(envelope, StepResult(committed, grown))
        queue.look_again()

    # -- commits

    @on(Commit)
    def commit(self, message: Commit, envelope: Envelope[Ack]) -> None:
        lease = self.leases.get(message.lease) or self.leases.find(message.lease, envelope)
        if lease is None:
            return
        error = self._commit(lease, message.computed_tokens)
        if error is None:
            if message.lease in self.leases.prefilling:
                self.leases.measure(lease)
            self.out.reply(envelope, Ack(lease.path.num_committed))
        else:
            self.out.refuse(envelope, error)
        if self.queue.contended:
            self.queue.look_again()  # a request that shares these blocks may fit now

    def _commit(self, lease: LeaseState, computed: int) -> Exception | None:
        """Enter the full blocks of the first `computed` tokens into the tree. Returns why nothing
        was changed. A lease whose blocks the tree refuses fails."""
        path, tree = lease.path, lease.tree
        if lease.fault is None and not lease.loads:
            try:
                # New blocks that a sink is sent, or that the host may have, are entered below.
                if tree.commit_tokens(path, computed, self.announcements.enabled) >= 0:
                    return None
            except ValueError:  # refused below, with the reason
                pass
        error = self._refusal(lease, computed)
        if error is not None:
            return error
        try:
            start, stop, adopted = tree.commit(path, computed // self.index.block_size)
        except ValueError as refused:
            self.log.error("commit refused by the block tree", error=str(refused))
            text = f"lease of {lease.request_id!r} has ended: acquire again ({refused})"
            return lease.fail(LeaseEnded, text)()
        if stop > start:
            self._entered(path, start, stop, adopted)
        return None

    def _entered(self, path: Path, start: int, stop: int, adopted: list[int]) -> None:
        """Blocks [start, stop) of a path have entered the tree. adopted: see `BlockTree.commit`."""
        self.announcements.cached(path, start, stop, Reason.COMMIT)
        if adopted:
            self.evictions.drop_host_copies(pick_hashes(path.hashes(0, stop), adopted))

    def _refusal(self, lease: LeaseState, computed: int) -> Exception | None:
        """Why the first `computed` tokens of a lease cannot be committed."""
        if lease.fault is not None and lease.fault.func is RankLost:
            return lease.fault()
        if lease.loads:
            return lease.not_ready("commit")
        tokens = lease.path.num_tokens
        if not 0 <= computed <= tokens:
            return ValueError(f"computed_tokens is {computed}, the lease has {tokens} tokens")
        covered = lease.path.num_blocks * self.index.block_size
        if computed > covered:
            return ValueError(
                f"computed_tokens is {computed}, the lease has blocks for {covered} of its "
                f"{tokens} tokens: call next_chunk()"
            )
        return None if lease.fault is None else lease.fault()

    # -- ends of leases

    @on(Finish)
    def finish(self, message: Finish, envelope: Envelope[Ack]) -> None:
        lease = self.leases.get(message.lease) or self.leases.find(message.lease, envelope)
        if lease is None:
            return
        hints = message.hints or lease.hints
        if hints is not None and hints.pin:
            path, turn_blocks = lease.path, self.index.turn_blocks
            if path.num_full_blocks - path.num_hashed > turn_blocks:
                then = partial(self.finish, message, envelope)
                self.out.begin(hash_first(path, turn_blocks, then))
                return
        if message.computed_tokens is not None:
            error = self._commit(lease, message.computed_tokens)
            if error is not None:
                self.out.refuse(envelope, error)
                return
        lease.output_tokens = message.output_tokens
        if message.hints is not None:
            lease.hints, lease.pin_prompt = message.hints, False
        pinned = 0
        if hints is not None and hints.pin:
            pinned = self.pins.pin(lease)
            if pinned:
                self.queue.check_reach()
        self._close(lease, envelope, pinned)

    @on(Preempt)
    def preempt(self, message: Preempt, envelope: Envelope[Ack]) -> None:
        lease = self.leases.find(message.lease, envelope)
        if lease is None:
            return
        error = self._commit(lease, message.computed_tokens) if message.computed_tokens else None
        if error is not None:
            self.out.refuse(envelope, error)
            return
        self.leases.remember_preempted(lease.request_id)
        self._close(lease, envelope)

    @on(Abandon)
    def abandon(self, message: Abandon) -> None:
        lease = self.leases.get(message.lease)
        if lease is not None:
            self.leases.abandoned += 1
            self._close(lease, None)
        self.queue.cancel(message.lease, "this request was given up")
        self.queue.serve()

    def _detach(self, lease: LeaseState) -> None:
        """Remove a lease from everything that waits for it or with it, without its blocks."""
        if self.queue.contended and lease.granted and self.queue.call_of(lease.id):
            self.queue.cancel(lease.id, "it has ended")  # an extend or a fork
        self.leases.remove(lease)

    def _drop(self, lease: LeaseState) -> None:
        """End a lease that never had its blocks."""
        self.loads.cancel(lease, 0)
        self._detach(lease)
        self.index.release(lease.tree, lease.path)

    def _give_back(self, lease: LeaseState) -> None:
        """End a lease that was granted to a caller who no longer waits."""
        self._drop(lease)
        self.queue.serve()

    def _close(self, lease: LeaseState, envelope: Envelope[Ack] | None, pinned: int = 0) -> None:
        """Announce, save and release the blocks of a lease. Without an envelope its caller has
        gone, and nothing is saved."""
        path, tree, index = lease.path, lease.tree, self.index
        pool, policy, committed = index.pool, index.policy, path.num_committed
        self._detach(lease)
        reports = self.announcements.enabled or self.saves.enabled
        if not reports and lease.hints is None:
            output, now = -1, 0.0
            if policy.tables is not None:
                output, now = lease.output(), policy.now()
            if index.ages is not None:
                index.ages.released(path.blocks())
            # None, and unchanged, of a cleared tree, and of one with salts or hints.
            freed = tree.end(path, output, now)
            if freed is not None:
                pool.give(freed)
                if envelope is not None:
                    self.out.reply(envelope, Ack(committed, pinned))
                self.queue.serve()
                return
        self.out.begin(self._close_in_slices(lease, envelope, pinned))

    def _close_in_slices(
        self, lease: LeaseState, envelope: Envelope[Ack] | None, pinned: int
    ) -> Work:
        path, tree, turn_blocks = lease.path, lease.tree, self.index.turn_blocks
        committed = 0 if was_cleared(tree, path) else path.num_committed
        self.index.closing += 1
        hint = self.index.policy.end(tree, path, lease.output(), lease.hints)
        saved = SavedPath(tree, path, 1, *hint)
        if self.announcements.enabled:
            for start, stop in slices(0, committed, turn_blocks):
                if start:
                    yield
                if not was_cleared(tree, path):
                    self.announcements.finished(tree, path, start, stop)
        if envelope is not None and self.saves.enabled:
            for start, stop in self.saves.ranges(committed):
                if committed > turn_blocks:
                    yield
                if saved.parts and not was_cleared(tree, path):
                    self.saves.start(saved, start, stop)
        if saved.answered():
            self.index.release(tree, path)
        self.index.closing -= 1
        if envelope is not None:
            self.out.reply(envelope, Ack(committed, pinned))
        self.queue.serve()

    # -- loads, evictions and saves

    def wait_for_loads(self, message: Ready | LayerReady, envelope: Envelope[Any]) -> None:
        self.leases.wait(message, envelope)

    ready = on(Ready)(wait_for_loads)
    layer_ready = on(LayerReady)(wait_for_loads)

    @on(Loaded)
    def loaded(self, message: Loaded) -> None:
        if self.loads.finish(message.op, message.num_loaded, message.from_host):
            self.queue.serve()

    @on(LayersLoaded)
    def layers_loaded(self, message: LayersLoaded) -> None:
        self.loads.layers_loaded(message)

    @on(LoadDeadline)
    @on(LoadStalled)
    def load_overdue(self, message: LoadDeadline | LoadStalled) -> None:
        if self.loads.overdue(message.op):
            self.queue.serve()

    @on(Offloaded)
    def offloaded(self, message: Offloaded) -> None:
        if self.evictions.finish(message.op, message.kept_mask):
            self.queue.serve()

    @on(Saved)
    def saved(self, message: Saved) -> None:
        """After the last blocks of a finished request its path is released."""
        saved = self.saves.finish(message.op, message.kept_mask)
        if saved is not None:
            if saved.answered():
                self.index.release(saved.tree, saved.path)
            self.queue.serve()

    @on(HostBlocksRemoved)
    @on(HostBlocksAdded)
    def host_blocks(self, message: HostBlocksAdded | HostBlocksRemoved) -> None:
        """A hint of more blocks from before a clear or a loss is out of date."""
        if isinstance(message, HostBlocksRemoved):
            self.index.tree.host_blocks_removed(message.hashes)
        elif (
            message.clears == self.clears.sent
            and message.memory_generation == self.index.memory_generation
        ):
            self.index.tree.host_blocks_added(message.hashes)

    # -- restarts and losses

    def started(self) -> None:
        """A restarted index begins with an empty device tier."""
        if self.incarnation:
            self.announcements.cleared(Reason.RESTART)

    @on(DataPlaneStatus)
    def data_plane_status(self, message: DataPlaneStatus) -> None:
        """Device memory was lost, or copies in flight may never complete."""
        if message.memory_lost:  # no block can be hit any more, and no granted lease be used
            self.index.memory_generation = message.generation
            self.index.retire()
            self.pins.device_lost()
            self.announcements.cleared(Reason.RESTART)
            lost = "a rank was lost, and with it what this lease's blocks held there"
            self.leases.fail_all(RankLost, lost)
        if message.memory_lost or not message.available:
            self.evictions.stall()
            self.queue.serve()

    @on(PeerRestarted)
    def peer_restarted(self, message: PeerRestarted) -> None:
        """It has lost its operations in flight, or a notifier its ledger."""
        if message.name == "cpu_evictor":
            self.host_lost()
        elif message.name == "gpu_swapper":
            # No copy is in flight. The notice of the host tier's restart comes first, and a copy
            # that is sent between the two is dropped like those before.
            for op in list(self.copies):
                self.copied(CopiedWithin(op, failed=(0,)))
        elif message.name == "flush_notifier":
            self.announcements.announce_all()

    def host_lost(self) -> None:
        """The host tier and the swapper have restarted: no copy is in flight, interrupted copies
        have not arrived, and the host tier is empty."""
        self.loads.host_lost()
        self.evictions.host_lost()
        for saved in self.saves.host_lost():
            self.index.release(saved.tree, saved.path)
        self.index.tree.clear_host()
        self.out.begin(self._sweep_host(self.index.tree))
        self.pins.again()
        self.queue.serve()
        self.clears.again()

    def _sweep_host(self, tree: BlockTree) -> Work:
        """Remove the nodes of blocks that were on the host before its restart."""
        while not tree.sweep_host(self.index.turn_blocks):
            yield

    # -- clears, pins, quotas, the namespace

    @on(Clear)
    def clear(self, message: Clear, envelope: Envelope[Ack]) -> None:
        """Leases keep their blocks in the old tree until they end."""
        if self.queue.asleep:
            self.out.refuse(envelope, CacheAsleep())
        elif message.salt is not None:
            self.out.begin(self._clear_salt(message.salt, envelope, storage=message.storage))
        elif message.lora is not None:
            self._clear_lora(message.lora, envelope)
        else:
            self.pins.end_all()
            freed = self.index.retire()
            self.announcements.cleared(Reason.CLEAR)
            op = self.clears.start(envelope, None, storage=message.storage)
            self.clears.device_cleared(op, envelope, freed)
            self.queue.serve()

    def _clear_salt(self, name: str, envelope: Envelope[Ack], *, storage: bool) -> Work:
        """Forget the blocks of a salt, some of them a turn. Leases keep theirs, which nothing else
        finds."""
        index, tree, salt = self.index, self.index.tree, salt_id(name)
        self.pins.end_all(lambda pin: pin.salt == salt)
        index.policy.quotas.forget(name)
        tree.begin_forget(salt)
        used = [lease.path for lease in self.leases]
        used += self.loads.paths()
        used += [saved.path for saved in self.saves.paths()]
        for path in used:
            if path.salt == salt:
                path.forgotten = True
        op = self.clears.start(envelope, salt, storage=storage)
        count, over = 0, False
        index.closing += 1
        while True:
            over, freed, hashes = tree.forget_step(index.turn_blocks, index.hashes)
            index.pool.give(freed)
            count += len(freed)
            if not tree.retired:
                self.announcements.removed(hashes, Reason.CLEAR)
            if over:
                break
            self.queue.serve()
            yield
        index.closing -= 1
        self.clears.device_cleared(op, envelope, count)
        self.queue.serve()

    def _clear_lora(self, lora: str, envelope: Envelope[Ack]) -> None:
        """Let requests with an adapter start from another root hash. Blocks below the previous one
        age out, as after `set_namespace`."""
        scopes = self.announcements.scopes
        self.pins.end_all(lambda pin: scopes.get(pin.root, PLAIN).lora == lora)
        self.roots.renew(lora)
        self.announcements.report(NamespaceChanged(self.roots.namespace))
        self.out.reply(envelope, Ack())
        self.queue.serve()

    @on(HostCleared)
    def host_cleared(self, message: HostCleared) -> None:
        self.clears.finish(message)

    @on(ChangeShares)
    def change_shares(self, message: ChangeShares, envelope: Envelope[Ack]) -> None:
        change = message.change
        if isinstance(change, SetQuota):
            set_quota = self.index.policy.set_quota
            self.out.to_evictor(set_quota(self.index.tree, change.salt, change.quota))
            self.out.reply(envelope, Ack())
            return
        self.set_root(change.path, change.scope)

        def unpin() -> None:
            if self.set_root(change.path, change.scope):
                self.change_shares(message, envelope)  # the namespace has changed since
                return
            self.out.reply(envelope, Ack(self.pins.unpin(change.path)))
            self.queue.serve()

        self.out.begin(hash_first(change.path, self.index.turn_blocks, unpin))

    @on(PinExpired)
    def pin_expired(self, message: PinExpired) -> None:
        self.pins.expire(message.pin)
        self.queue.serve()

    @on(SetNamespace)
    def set_namespace(self, message: SetNamespace, envelope: Envelope[Ack]) -> None:
        """Requests that wait are admitted under it. Blocks of the previous one age out."""
        if message.namespace != self.roots.namespace:
            self.roots.use(message.namespace)
            self.announcements.report(NamespaceChanged(message.namespace))
            self.queue.check_reach()  # requests that wait share no pinned blocks any more
        self.out.reply(envelope, Ack())

    @on(SetNumBlocks)
    def set_num_blocks(self, message: SetNumBlocks) -> None:
        if not self.index.pool.total:
            self.index.set_num_blocks(message.num_blocks)
            self.queue.free_low = message.free_low
            self.queue.free_high = message.free_high

    # -- pause and sleep

    @on(Pause)
    def pause(self, message: Pause, envelope: Envelope[Ack]) -> None:
        """For a sleep, end all pins and empty the device, some blocks a turn: each block is evicted
        as for a request, so that the host tier gets a copy as far as it has capacity, and sinks are
        sent each removal."""
        queue = self.queue
        if not message.asleep:
            queue.paused = True
            queue.when_idle(partial(self.out.reply, envelope, Ack()))
        elif self._is_busy():
            self.out.refuse(envelope, LeasesOpen(len(self.leases)))
        else:
            queue.asleep = True
            self.pins.end_all()
            queue.when_idle(partial(self._empty_device, envelope))

    @on(Resume)
    def resume(self, message: Resume, envelope: Envelope[Ack]) -> None:
        if message.awake:
            self.queue.asleep = False
        else:
            self.queue.paused = False
        self.out.reply(envelope, Ack(len(self.queue.held)))
        self.admit_waiting()

    def _is_busy(self) -> bool:
        return bool(self.leases or self.queue.waiting or self.queue.heads())

    def _empty_device(self, envelope: Envelope[Ack]) -> None:
        """No transfer is in flight: evict the next blocks, or answer."""
        if envelope.abandoned or not self.queue.asleep:
            return  # its caller ends the sleep
        if self.evictions.evict(self.index.turn_blocks):
            self.queue.on_idle.append(partial(self._empty_device, envelope))
            self.queue.proceed_later()
            return
        tree = self.index.tree.statistics()
        if tree["referenced"] or self.index.reserved or self._is_busy():  # it came before
            self.queue.asleep = False
            self.out.refuse(envelope, LeasesOpen(len(self.leases)))
            return
        if tree["device"]:  # blocks that no eviction takes
            self.index.retire()
            self.announcements.cleared(Reason.CLEAR)
        self.out.reply(envelope, Ack())

    # -- inspection

    def in_use(self) -> bool:
        """Whether a lease, a request or an operation may hold device blocks."""
        holders = (self.leases, self.loads, self.evictions, self.saves, self.queue.waiting)
        return any(holders) or bool(self.copies)

    def check(self) -> None:
        deque(self.check_steps(), maxlen=0)

    def check_steps(self) -> Iterator[None]:
        if not (self.out.works or self.in_use()):
            tree, pool = self.index.tree.statistics(), self.index.pool
            used = tree["referenced"] - self.index.tree.pinned
            ensure(used == 0, f"{used} nodes referenced, no lease")
            used = pool.total - self.index.free
            ensure(used == tree["device"], f"{used} blocks in use, {tree['device']} in the tree")
            shared = pool.num_shared
            ensure(not shared, f"{shared} blocks with several owners, no lease")
        yield from chain(self.leases.check_steps(), self.index.check_steps())

    def index_statistics(self) -> IndexStatistics:
        index, leases, evictions, queue = self.index, self.leases, self.evictions, self.queue
        tree = index.tree.statistics()
        return IndexStatistics(
            requests=leases.requests,
            blocks_looked_up=leases.looked_up,
            device_hits=leases.device_hits,
            host_hits=leases.host_hits,
            storage_hits=leases.storage_hits,
            no_room=queue.no_room,
            refused_size=queue.refused_size,
            refused_pins=queue.refused_pins,
            preempted=leases.preempted,
            abandoned=leases.abandoned,
            leases=len(leases),
            waiting=len(queue.waiting) + len(queue.acquires) + len(queue.forks),
            blocks_total=index.pool.total,
            blocks_free=index.free,
            nodes=tree["nodes"],
            nodes_referenced=tree["referenced"],
            evictable=tree["evictable"],
            evicted=evictions.evicted,
            rescued=evictions.rescued,
            loads_in_flight=len(self.loads),
            offloads_in_flight=len(evictions),
            saves_in_flight=len(self.saves),
            overdue_loads=self.loads.overdue_loads,
            resumed=leases.resumed,
            forks=leases.forks,
            tails_copied=self.tails,
            blocks_shared=index.pool.num_shared,
            pinned=index.tree.pinned,
            pins_refused=self.pins.refused,
            pins_expired=self.pins.expired,
            quota_evictions=index.policy.quota_evictions + index.tree.quota_evictions,
            prefill_tokens_per_s=self.prefill.tokens_per_s,
        )


def empty_like(path: Path) -> Path:
    """A path without tokens below the same root, of the same salt."""
    made = Path(path.block_size, path.root, path.flat)
    made.salt = path.salt
    return made


def copy_of(path: Path, blocks: int) -> Path:
    """The leading blocks of a path: tokens and extra keys, without nodes and device blocks."""
    copy = empty_like(path)
    copy.extend(np.frombuffer(path.tokens(0, blocks), "<u4"))
    for position, extra in path.extra_keys(0, blocks):
        copy.set_extra(position, extra)
    return copy


def tail_of(path: Path) -> int:
    """The device block of a last block that is not full, -1 if there is none."""
    full = path.num_full_blocks
    if path.num_tokens == full * path.block_size or path.num_blocks <= full:
        return -1
    return path.blocks(full, full + 1)[0]
