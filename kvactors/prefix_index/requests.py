"""Requests for device blocks: acquire, extend, reserve, truncate, fork, decode steps, prefetch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvactors.actor import Envelope
from kvactors.cpu_evictor.messages import PrefetchToHost
from kvactors.errors import (
    CacheAsleep,
    DeviceError,
    LeaseBusy,
    LeaseEnded,
    NoRoom,
    NotReady,
    NumBlocksUnset,
    RankLost,
    TokensCommitted,
)
from kvactors.gpu_swapper.messages import CopiedWithin, CopyWithin
from kvactors.identity import PLAIN, RequestScope, leading_items
from kvactors.native import HOST, BlockTree, Path
from kvactors.prefix_index.leases import LeaseState
from kvactors.prefix_index.messages import (
    Ack,
    Acquire,
    AcquireResult,
    Extend,
    Fork,
    ForkedLease,
    ForkResult,
    Prefetch,
    ReadyResult,
    Reserve,
    StepLeases,
    StepResult,
    Truncate,
)
from kvactors.prefix_index.tree import Match, was_cleared
from kvactors.prefix_index.waiting import TURN_REQUESTS, Line, Wait
from kvactors.prefix_index.work import Work, slices
from kvactors.quotas import salt_id

if TYPE_CHECKING:
    from kvactors.prefix_index.actor import IndexCore


class TailCopy(msgspec.Struct, eq=False):
    """The copies of one last block that is not full. They own their blocks until they end.

    Attributes:
        source, targets: device blocks.
        forks: the leases that the targets are for.
        envelope: answered when the copies have ended.
    """

    source: int
    targets: tuple[int, ...]
    forks: list[LeaseState]
    envelope: Envelope[ForkResult]


class Requests:
    """Gives requests their device blocks: now, or once they are free.

    A request is matched and granted in slices of one turn each, most of them in one. Blocks that
    are pinned stay on the device, and blocks that are reserved are not given to others, so requests
    between two slices take nothing from this one.

    A fork references the same nodes of the tree and waits for the same loads. Full blocks that are
    not committed get a further owner in the pool: the tokens of a full block do not change, so
    every lease that computes it writes the same bytes. The last block is written by both leases if
    it is not full, so the fork gets a copy of it before either of them can continue.

    A reserved block of a lease is a private one beyond those that its tokens need. The next tokens
    use it, and the end of the lease gives it back like any other private block.

    Attributes:
        forks: leases made by forks.
        tails: blocks copied for them.
        copies: copies for forks in flight, by operation.
    """

    def __init__(self, core: IndexCore, ops: Iterator[int]) -> None:
        self.forks = self.tails = 0
        self.copies: dict[int, TailCopy] = {}
        self._ops = ops
        self._out = core.out
        self._index, self._room = core.index, core.index.room
        self._leases = core.leases
        self._loads = core.loads
        self._evictions = core.evictions
        self._announcements = core.announcements
        self._queue = core.queue
        self._endings = core.endings
        self._roots = core.roots
        self._settings = core.settings

    def set_root(self, path: Path, scope: RequestScope) -> bool:
        """Let a path start from the root hash of the present namespace. Returns whether it did
        not."""
        root = self._roots.root(scope)
        changed = path.root != root
        if changed:
            path.set_root(root)
        if scope.salt is not None:
            path.salt = number = salt_id(scope.salt)
            self._index.policy.quotas.counts.see(number, scope.salt)
        self._announcements.remember(root, scope)
        return changed

    # -- acquire

    def acquire(self, message: Acquire, envelope: Envelope[AcquireResult]) -> None:
        """Match, pin and take blocks: now, once enough of them are free, or after a pause."""
        queue, index, path, pool = self._queue, self._index, message.path, self._index.pool
        quiet = not queue.contended or queue.is_quiet()
        if quiet and not (message.chunk_tokens or message.media) and pool.ages is None:
            if message.scope is not PLAIN or self._announcements.latest is not self._roots.plain:
                self.set_root(path, message.scope)
            policy, tokens, tree = index.policy, path.num_tokens, index.tree
            needed = -(-tokens // index.block_size)
            limit, fetch = (tokens - index.recompute_tokens) // index.block_size, 0
            if self._settings.fetch:
                fetch = min(limit, self._settings.fetchable(path, message.stored))
            if 0 < needed <= index.turn_blocks:
                # Every cached block is on the device, and enough others are free.
                free = pool.free - self._room.reserved - queue.free_low
                root = self._announcements.latest
                now = 0.0 if policy.tables is None else policy.now()
                run = tree.pin_resident(path, root, limit, fetch, needed, free, now)
                if run >= 0:
                    lease = self._new_lease(message, run, run)
                    self._leases.grant(lease)
                    table = path.complete(run, pool.take(needed - run))
                    result = AcquireResult(table, run * index.block_size, False, run)
                    if not self._out.reply(envelope, result):
                        self._endings.give_back(lease)
                    return
        if queue.asleep:
            self._out.refuse(envelope, CacheAsleep())
        elif queue.paused or queue.held.waits:
            queue.hold(envelope)
        else:
            self._enter(message, envelope)

    def _new_lease(self, message: Acquire, device_hits: int, expected_blocks: int) -> LeaseState:
        tree, media = self._index.tree, message.media
        lease = LeaseState(
            message.lease,
            message.request_id,
            message.path,
            tree,
            message.deadline,
            media,
            device_hits,
            expected_blocks,
        )
        if message.hints is not None:
            lease.hints = message.hints
        return lease

    def _enter(self, message: Acquire, envelope: Envelope[AcquireResult]) -> None:
        """Admit a request, before those that wait for room if it fits and may overtake them."""
        queue = self._queue
        self.set_root(message.path, message.scope)
        needed = self._index.blocks_for(message.path.num_tokens)
        error = queue.unreachable(message.path, needed, message.deadline, message.media)
        if error is not None:
            queue.refuse(envelope, error)
            return
        heads = queue.heads()
        if heads:
            claims = queue.forks.claims + queue.acquires.claims + needed
            if claims > queue.spare(heads) or not self._fits(message):
                if message.wait_for_room:
                    queue.wait_for_room(envelope)
                else:
                    first = "requests that wait for room come first"
                    queue.refuse(envelope, NoRoom(needed, 0, self._index.tree.pinned, first))
                return
            queue.overtakings += 1
        self._admit(message, needed, envelope)

    def _fits(self, message: Acquire | Fork) -> bool:
        """Whether a request that holds nothing, or the copies of a fork, can have blocks now."""
        if isinstance(message, Fork):
            return self._room.available >= len(message.leases)
        path, index, media = message.path, self._index, message.media
        self.set_root(path, message.scope)
        fetch = self._settings.fetchable(path, message.stored)
        needed = index.needed_blocks(path, message.chunk_tokens, fetch=fetch, media=media)
        return index.fits(path, needed, media)

    def _admit(self, message: Acquire, needed: int, envelope: Envelope[AcquireResult]) -> None:
        """Match a request of `needed` blocks and give it its blocks, or let it wait."""
        self._out.begin(self._match(message, needed, envelope))

    def _match(self, message: Acquire, needed: int, envelope: Envelope[AcquireResult]) -> Work:
        path, index, room, queue = message.path, self._index, self._room, self._queue
        tree, settings = index.tree, self._settings
        fetch = settings.fetchable(path, message.stored)
        media, chunk = message.media, message.chunk_tokens
        long, states = needed > index.turn_blocks, b""
        if not long:
            needed = index.needed_blocks(path, chunk, fetch=fetch, media=media)
            if room.free < needed and not (queue.releasing or index.can_fit(path, needed)):
                queue.lacks_room(envelope, needed)
                return
        index.policy.advance(tree)
        if long:
            pinned = yield from self._pin_slices(message, fetch, envelope)
            if pinned is None:
                yield from self._match_again(message, tree, envelope)
                return
            states = pinned
        # A request that is refused in the end must not count hits or keep blocks that leave for
        # others: requests that try again would keep each other's victims and never be granted.
        certain = not queue.waiting and room.free >= needed
        used = certain or long
        match = index.match(path, fetch=fetch, media=media, chunk=chunk, used=used, states=states)
        lease = self._new_lease(message, match.num_device_blocks, match.expected_blocks)
        if not queue.waiting and room.free >= match.new_blocks:
            if not used:
                tree.keep(path)
            room.reserved += match.new_blocks
            yield from self._grant(lease, match, message, envelope)
            return
        # Without an offload no copy has to be waited for: a long request waits for later turns.
        may_wait = message.wait or message.wait_for_room or (long and not settings.offload)
        if may_wait:
            self._loads.begin(lease, match.segments, placed=False)
        wait = Wait(
            lease.id,
            envelope,
            needed=match.new_blocks,
            salt=path.salt,
            complete=lambda: self._out.begin(self._grant_late(lease, match, message, envelope)),
            give_up=lambda: self._endings.forget(lease),
        )
        if not queue.request(wait, may_wait=may_wait, deadline=message.deadline):
            self._endings.forget(lease)
            queue.lacks_room(envelope, match.new_blocks)
        elif queue.waiting.get(message.lease) is wait:
            tree.keep(path, used=False)

    def _pin_slices(
        self, message: Acquire, fetch: int, envelope: Envelope[AcquireResult]
    ) -> Generator[None, None, bytes | None]:
        """Pin the leading blocks of a long request, all but the last slice. Returns the states of
        the nodes that it holds beyond those on the device, None if it has to be matched again."""
        path, index, tree, states = message.path, self._index, self._index.tree, b""
        limit = index.limit_of(path.num_tokens)
        if message.media:
            limit = index.before_media(index.reach(path, limit, fetch=fetch), message.media)
        while limit - path.num_held > index.turn_blocks:
            upto = path.num_held + index.turn_blocks
            _, states = tree.pin(path, upto)
            if states or path.num_held < upto:
                break
            yield
            if not self._is_current(message, tree, envelope):
                return None
        return states

    def _is_current(
        self, message: Acquire, tree: BlockTree, envelope: Envelope[AcquireResult]
    ) -> bool:
        """Whether the caller still waits, the blocks that the request holds were not cleared, and
        the namespace is the same."""
        return (
            not envelope.abandoned
            and not was_cleared(tree, message.path)
            and message.path.root == self._roots.root(message.scope)
        )

    def _match_again(
        self, message: Acquire, tree: BlockTree, envelope: Envelope[AcquireResult]
    ) -> Work:
        """Release the blocks of a request after a clear, a loss of device memory or a change of the
        namespace between two slices, then match it again."""
        self._room.closing += 1
        for _ in self._index.release_slices(tree, message.path):
            yield
            self._queue.serve()
        self._room.closing -= 1
        if envelope.abandoned:
            self._out.refuse(envelope, LeaseEnded("this request was given up"))
        else:
            self.set_root(message.path, message.scope)
            needed = self._index.blocks_for(message.path.num_tokens)
            yield from self._match(message, needed, envelope)
        self._queue.serve()

    def _grant(
        self,
        lease: LeaseState,
        match: Match,
        message: Acquire,
        envelope: Envelope[AcquireResult],
    ) -> Work:
        """The new blocks of a request are reserved: enter them into its table."""
        path, index, left = lease.path, self._index, match.new_blocks
        while left > index.turn_blocks and not match.segments:
            start = match.num_device_blocks + match.new_blocks - left
            path.assign(start, index.take_reserved(index.turn_blocks))
            left -= index.turn_blocks
            yield
            if not self._is_current(message, lease.tree, envelope):
                self._room.reserved -= left
                self._queue.serve()
                yield from self._match_again(message, lease.tree, envelope)
                return
        blocks = index.take_reserved(left)
        if match.segments:
            index.fill_table(path, match, blocks)
            self._loads.begin(lease, match.segments, placed=True)
        elif blocks:
            path.assign(match.num_device_blocks + match.new_blocks - left, blocks)
        self._granted(lease, envelope)

    def _grant_late(
        self,
        lease: LeaseState,
        match: Match,
        message: Acquire,
        envelope: Envelope[AcquireResult],
    ) -> Work:
        """The new blocks of a request that waited are reserved. The cached part of its path or its
        namespace may have changed: match a short one again, and continue with the loads sent ahead
        only if nothing has."""
        before, index, path = lease.tree, self._index, lease.path
        if match.new_blocks > index.turn_blocks and not match.segments:
            if self._is_current(message, before, envelope):
                yield from self._grant(lease, match, message, envelope)
                return
            self._room.reserved -= match.new_blocks
            self._queue.serve()
            yield from self._match_again(message, before, envelope)
            return
        # The table may hold new blocks in place of a shared load that was not completed.
        index.pool.give(before.release(path))
        lease.fault = None
        lease.tree = index.tree
        changed = self.set_root(path, message.scope)
        fetch = self._settings.fetchable(path, message.stored)
        index.policy.advance(index.tree)
        again = index.match(path, fetch=fetch, media=lease.media, chunk=message.chunk_tokens)
        if (
            not changed
            and again == match
            and lease.tree is before
            and len(lease.loads) == len(match.segments)
        ):
            index.fill_table(path, match, index.take_reserved(match.new_blocks))
            self._loads.place(lease)
            self._granted(lease, envelope)
            return
        self._loads.cancel(lease, 0)
        self._endings.detach(lease)
        # Blocks whose loads have completed since are on the device now.
        lease.device_hits, lease.host_hits, lease.storage_hits = again.num_device_blocks, 0, 0
        lease.expected_blocks = again.expected_blocks
        self._room.reserved -= match.new_blocks
        lacking = again.new_blocks - self._room.free  # a clear may have removed hits
        if lacking > 0:
            self._evictions.drop(lacking, path.salt)
        if again.new_blocks > self._room.free:
            self._endings.forget(lease)
            self._queue.lacks_room(envelope, again.new_blocks - match.new_blocks)
            return
        self._room.reserved += again.new_blocks
        yield from self._grant(lease, again, message, envelope)

    def _granted(self, lease: LeaseState, envelope: Envelope[AcquireResult]) -> None:
        """A request has its blocks."""
        index, expected = self._index, lease.expected_blocks
        self._leases.grant(lease)
        if index.pool.ages is not None and lease.device_hits:
            index.pool.ages.matched(lease.path.blocks(0, lease.device_hits))
        if lease.media:
            expected = index.before_media(lease.expected_blocks, lease.media)
        cached, pending = expected * index.block_size, bool(lease.loads)
        result = AcquireResult(lease.path.table(), cached, pending, lease.device_hits)
        if not self._out.reply(envelope, result):
            self._endings.give_back(lease)
        elif self._queue.free_low:
            self._queue.evict_to_watermark()

    def prefetch(self, message: Prefetch, envelope: Envelope[Ack]) -> None:
        """Ask the host tier to fetch the blocks that the device lacks."""
        if not self._index.pool.total:
            self._out.refuse(envelope, NumBlocksUnset())
            return
        if self._queue.asleep:
            self._out.refuse(envelope, CacheAsleep())
            return
        path, index = message.path, self._index
        self.set_root(path, message.scope)
        limit = index.limit_of(path.num_tokens)
        limit = min(limit, self._settings.fetchable(path, message.stored))
        start, states = index.tree.peek(path, limit)
        wanted = max(0, limit - start)
        if wanted:
            lineages = self._announcements.lineages_of_path(path, 0, limit)
            hashes, deadline = path.hashes(0, limit), message.deadline
            held = sum(1 for state in states[:wanted] if state & HOST)
            self._evictions.name_host_victims(wanted - held)
            self._out.to_evictor(
                PrefetchToHost(path.root, hashes, start, deadline, lineages, path.salt)
            )
        self._out.reply(envelope, Ack(wanted))

    # -- requests that wait

    def admit_waiting(self) -> None:
        """A turn's share of the requests that wait: those that wait for room came before those of a
        pause."""
        self._admit_room()
        for _ in range(TURN_REQUESTS):
            queue = self._queue
            if queue.paused or queue.asleep or not queue.held.waits:
                return
            wait = queue.held.remove(next(iter(queue.held.waits)))
            if wait is not None and not wait.envelope.abandoned:
                self._enter(wait.message, wait.envelope)
        if self._queue.held.waits:
            self._queue.proceed_later()

    def _admit_room(self) -> None:
        """Look at the first requests that wait for room, and admit those that fit, unless they
        would overtake others too often."""
        queue, heads = self._queue, list[Wait]()
        lines = (queue.forks, queue.acquires)
        before, claims, spare = sum(map(len, lines)), 0, queue.spare(heads)
        for line in lines:
            head: Wait | None = None
            for wait in list(islice(line.waits.values(), TURN_REQUESTS)):
                message = wait.message
                if wait.envelope.abandoned:
                    if line.remove(wait.lease) is not None:
                        self._out.refuse(wait.envelope, LeaseEnded("this request was given up"))
                    continue
                if line is queue.acquires and not self._can_try(message):
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

    def _can_try(self, message: Acquire) -> bool:
        """Whether a request that waits for room can be matched now."""
        path = message.path
        releasing = path.num_held or path.num_blocks  # what it had in its last attempt
        return not (releasing or self._queue.paused or self._queue.acquires.matching)

    def _retry(self, line: Line, wait: Wait) -> None:
        """Admit a request that waited for room. It has its place again if it does not fit."""
        message, envelope = wait.message, wait.envelope
        line.match(wait.lease)
        if isinstance(message, Fork):
            self.fork(message, envelope)
            line.matching.pop(wait.lease, None)
        else:
            self._out.begin(self._match_in_place(message, line, envelope))

    def _match_in_place(self, message: Acquire, line: Line, envelope: Envelope[Any]) -> Work:
        needed, later = self._index.blocks_for(message.path.num_tokens), False
        for _ in self._match(message, needed, envelope):
            later = True
            yield
        line.matching.pop(message.lease, None)
        if later:
            self._queue.look_again()

    # -- growth of leases

    def grow(self, message: Extend | Reserve, envelope: Envelope[AcquireResult]) -> None:
        """Append tokens to a lease, and blocks when a boundary is crossed, or give it blocks for
        tokens that it does not have yet."""
        lease = self._leases.get(message.lease) or self._leases.find(message.lease, envelope)
        if lease is None:
            return
        path, index, queue = lease.path, self._index, self._queue
        total = -(-tokens_after(message) // index.block_size)
        needed = max(0, total - path.num_blocks)
        if not queue.contended and lease.fault is None and message.position == path.num_tokens:
            if not needed:
                self._grow(path, message, envelope, [])
                return
            if needed <= self._room.free:
                self._grow(path, message, envelope, index.take(needed))
                return
        error = self._busy(lease, message.position)
        if error is not None:
            self._out.refuse(envelope, error)
            return
        error = queue.unreachable(path, total, lease.deadline) if needed else None
        if error is not None:
            queue.refuse(envelope, error)
            return

        def complete() -> None:
            self._grow(path, message, envelope, index.take_reserved(needed))

        wait = Wait(lease.id, envelope, needed=needed, salt=path.salt, complete=complete)
        self._take(wait, lease.deadline)

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
        self._out.reply(envelope, AcquireResult(tuple(blocks), 0, False, 0))

    def _busy(self, lease: LeaseState, position: int) -> Exception | None:
        """Why the table of a lease cannot be changed now. position: tokens of the lease, as its
        holder counts them."""
        if lease.fault is not None and lease.fault.kind is RankLost:
            return lease.fault.error()
        call = self._queue.call_of(lease.id)
        if call is not None and call.abandoned:
            self._queue.cancel(lease.id, "this call was cancelled")
            call = None
        if call is None and position == lease.path.num_tokens:
            return None
        return LeaseBusy(
            f"the lease of {lease.request_id!r} has {lease.path.num_tokens} tokens, or is being "
            "extended"
        )

    def _take(self, wait: Wait, lease_deadline: float, *, may_wait: bool = True) -> None:
        """Give a request of a lease its blocks, or let it wait for them. may_wait: whether it waits
        for evictions and copies in flight."""
        if not wait.needed:
            wait.complete()
            return
        deadline = wait.envelope.deadline
        deadline = lease_deadline if deadline is None else deadline
        if not self._queue.request(wait, may_wait=may_wait, deadline=deadline):
            self._queue.lacks_room(wait.envelope, wait.needed)

    def truncate(self, message: Truncate, envelope: Envelope[Ack]) -> None:
        """Drop the tokens of a lease beyond a number, and the blocks that the rest does not
        need."""
        lease, kept = self._leases.find(message.lease, envelope), message.num_tokens
        if lease is None:
            return
        error = self._busy(lease, message.position) or self._keeps(lease, kept)
        if error is not None:
            self._out.refuse(envelope, error)
            return
        path, (full, rest) = lease.path, divmod(kept, self._index.block_size)
        extra = leading_items(path.extra_key(full), rest) if rest else b""
        for load in self._index.loading.values():
            # A late load, which the lease continues without, still reports its blocks by the
            # tokens that they were loaded for.
            if load.path is path:
                load.path = copy_of(path, load.stop)
        freed = lease.tree.truncate(path, kept, extra)
        lease.media = tuple(item for item in lease.media if item[0] < kept)
        self._out.reply(envelope, Ack(path.num_blocks))
        if freed:
            self._out.begin(self._give(freed))

    def _keeps(self, lease: LeaseState, kept: int) -> Exception | None:
        """Why a lease cannot be cut to so many tokens."""
        if lease.loads:
            return NotReady(
                f"lease of {lease.request_id!r} waits for loads: await wait_ready() before "
                "truncate()"
            )
        if lease.fault is not None:
            return lease.fault.error()
        committed = lease.path.num_committed * self._index.block_size
        if kept < committed:
            return TokensCommitted(
                f"num_tokens is {kept}, but the first {committed} tokens are committed: other "
                "requests may share their blocks"
            )
        full, rest = divmod(kept, self._index.block_size)
        if rest and full < min(lease.path.num_full_blocks, lease.path.num_blocks):
            block = lease.path.blocks(full, full + 1)[0]
            if self._index.pool.is_shared(block):
                return TokensCommitted(
                    f"num_tokens is {kept}, within a full block that {lease.request_id!r} shares "
                    f"with a fork: truncate to a multiple of {self._index.block_size}, or before "
                    "the fork"
                )
        return None

    def _give(self, freed: list[int]) -> Work:
        """Return blocks to the pool, those of a turn at a time."""
        self._room.closing += 1
        for start, stop in slices(0, len(freed), self._index.turn_blocks):
            self._index.pool.give(freed[start:stop])
            if stop < len(freed):
                self._queue.serve()
                yield
        self._room.closing -= 1
        self._queue.serve()

    # -- forks

    def fork(self, message: Fork, envelope: Envelope[ForkResult]) -> None:
        """Make further leases of a lease once there are blocks for their copies of the last
        block."""
        lease, queue = self._leases.find(message.lease, envelope), self._queue
        if lease is None:
            return
        error = self._busy(lease, message.position)
        if error is None and lease.fault is not None:
            error = lease.fault.error()
        if error is not None:
            self._out.refuse(envelope, error)
            return
        needed = len(message.leases) if tail_of(lease.path) >= 0 else 0
        claim = lease.path.num_blocks + needed
        unreachable = queue.unreachable(lease.path, claim, message.deadline) if needed else None
        if unreachable is not None:
            queue.refuse(envelope, unreachable)
            return
        first = queue.forks.first
        if needed and first is not None and first.lease != lease.id:
            claims = queue.forks.claims + claim
            if claims > queue.spare([first]) or self._room.available < needed:
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
        """The blocks for the copies are reserved."""
        if lease.fault is not None:  # since it began to wait
            self._room.reserved -= needed
            self._out.refuse(envelope, lease.fault.error())
            return
        self._index.policy.advance(lease.tree)
        forks = [
            self._make_fork(lease, number, request_id)
            for number, request_id in zip(message.leases, message.request_ids, strict=True)
        ]
        self.forks += len(forks)
        if not needed:
            self._answer_fork(forks, envelope)
            return
        blocks = self._index.take_reserved(needed)
        for fork, block in zip(forks, blocks, strict=True):
            fork.path.assign(fork.path.num_blocks, [block])
        copy = TailCopy(tail_of(lease.path), tuple(blocks), forks, envelope)
        self._index.pool.share((copy.source, *copy.targets))
        self.tails += len(blocks)
        self._room.closing += 1
        op = next(self._ops)
        self.copies[op] = copy
        sources = (copy.source,) * len(blocks)
        self._out.to_swapper(CopyWithin(op, sources, copy.targets, self._index.memory_generation))

    def _make_fork(self, lease: LeaseState, number: int, request_id: str) -> LeaseState:
        """A lease of the same tokens, without a block for a last one that is not full."""
        path = Path(lease.path.block_size, lease.path.root)
        self._index.pool.share(lease.tree.fork(lease.path, path))
        fork = msgspec.structs.replace(
            lease,
            id=number,
            request_id=request_id,
            path=path,
            loads=list(lease.loads),
            ready=[],
            layers=[],
            counted=False,
        )
        self._leases.add_fork(fork)
        return fork

    def copied(self, message: CopiedWithin) -> None:
        """Copies for a fork have ended, some of them maybe without their bytes."""
        self._copied(message.op, failed=bool(message.failed))

    def swapper_lost(self) -> None:
        """The swapper has restarted: no copy is in flight. The notice of the host tier's restart
        comes first, and a copy that is sent between the two is dropped like those before."""
        for op in list(self.copies):
            self._copied(op, failed=True)

    def _copied(self, op: int, *, failed: bool) -> None:
        copy = self.copies.pop(op, None)
        if copy is None:
            return
        self._room.closing -= 1
        self._index.pool.give((copy.source, *copy.targets))
        if not failed:
            self._answer_fork(copy.forks, copy.envelope)
            self._queue.serve()
            return
        error = DeviceError("the last block could not be copied for the fork: nothing was changed")
        self._give_back(copy.forks)
        self._out.refuse(copy.envelope, error)

    def _answer_fork(self, forks: list[LeaseState], envelope: Envelope[ForkResult]) -> None:
        """The leases can be used, unless the caller has gone or device memory was lost."""
        lost = next((fork.fault for fork in forks if fork.fault is not None), None)
        if lost is not None and lost.kind is RankLost:
            self._give_back(forks)
            self._out.refuse(envelope, lost.error())
            return
        if not self._out.reply(envelope, ForkResult(tuple(map(self._describe, forks)))):
            self._give_back(forks)

    def _give_back(self, forks: list[LeaseState]) -> None:
        """End the leases, without those that have ended."""
        for fork in forks:
            if self._leases.get(fork.id) is fork:
                self._endings.give_back(fork)
        self._queue.serve()

    def _describe(self, fork: LeaseState) -> ForkedLease:
        hits = (fork.device_hits, fork.host_hits, fork.storage_hits)
        cached = sum(hits)
        if fork.loads:
            cached = self._index.before_media(fork.expected_blocks, fork.media)
        blocks = tuple(fork.path.blocks())
        ready = ReadyResult(blocks, cached * self._index.block_size, *hits)
        return ForkedLease(fork.path, ready, bool(fork.loads))

    # -- decode steps

    def step(self, message: StepLeases, envelope: Envelope[StepResult]) -> None:
        """Extend and commit many leases, as far as blocks are free or can be evicted at once. A
        lease that needs more is left to a separate commit and extend, so that a step waits for
        nothing. Quotas are by lease: with them, blocks are evicted for such an extend alone."""
        index, room, queue = self._index, self._room, self._queue
        leases = list(map(self._leases.get, message.leases))
        if queue.waiting or queue.forks.waits:
            leases = [
                None if lease is None or queue.call_of(lease.id) else lease for lease in leases
            ]
        paths = [
            None if lease is None or lease.fault is not None or lease.loads else lease.path
            for lease in leases
        ]
        trees = [None if lease is None else lease.tree for lease in leases]

        def take(count: int) -> list[int]:
            lacking = count - room.free - room.unpromised
            if lacking > 0:
                self._evictions.evict(lacking)
            return index.take(min(count, room.free))

        free = 0 if queue.waiting else room.free  # the requests that wait get them first
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
            self._endings.entered(path, start, stop, adopted)
        self._out.reply(envelope, StepResult(committed, grown))
        queue.look_again()


def tokens_after(message: Extend | Reserve) -> int:
    """Leading tokens that the block table covers after a message."""
    if isinstance(message, Extend):
        return message.position + message.added.num_tokens
    return message.num_tokens


def copy_of(path: Path, blocks: int) -> Path:
    """The leading blocks of a path: tokens and extra keys, without nodes and device blocks."""
    copy = Path(path.block_size, path.root)
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
