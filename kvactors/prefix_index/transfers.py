"""PrefixIndex, the part that moves blocks: loads, evictions and saves in flight, and what their
completions mean."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from kvactors.actor import ActorRef, Envelope, on
from kvactors.actor.clock import now
from kvactors.cpu_evictor.messages import (
    Admitted,
    Cancel,
    Discard,
    HostGained,
    HostGone,
    Load,
    Loaded,
    Offload,
    Offloaded,
    Place,
)
from kvactors.cpu_evictor.messages import Prefetch as PrefetchToHost
from kvactors.errors import NoRoom
from kvactors.flush_notifier.messages import Origin
from kvactors.native import HOST, BlockTree, Path
from kvactors.prefix_index.announcing import Announcing
from kvactors.prefix_index.index import BlockIndex, pick_keys
from kvactors.prefix_index.lineages import LineageSource
from kvactors.prefix_index.messages import Done, Landed, Overdue, Prefetch
from kvactors.prefix_index.records import EvictOp, Fault, Lease, LoadOp, Offloads, Saving, Segment
from kvactors.types import Reason

GRACE = 1.0
"""Seconds past a load's deadline after which its leases go on without it, in other device
blocks."""


class Transfers(Announcing):
    """State and handlers of operations in flight.

    exclusive: a block has one copy among device and host. host_tier: evicted blocks have somewhere
    to go. fetch: storage may hold what the tree does not know. token_root: with a store that is
    addressed by tokens alone, the root hash of the scope it was opened with; None without such a
    store. keep_lineages: the store keeps what block hashes are made of. root_of: the root hash that
    requests have now.
    """

    def __init__(
        self,
        ref: ActorRef,
        *,
        index: BlockIndex,
        evictor: ActorRef,
        notifier: ActorRef,
        exclusive: bool,
        host_tier: bool,
        fetch: bool,
        announce: bool,
        announce_whole: bool = False,
        token_root: bytes | None = None,
        era: int = 0,
        keep_lineages: bool = False,
        root_of: Callable[[Origin], bytes] = lambda _: b"",
    ) -> None:
        super().__init__(
            ref, index=index, notifier=notifier, announce=announce, announce_whole=announce_whole
        )
        self.lineages = LineageSource(keep_lineages, self.origins, root_of)
        self.era = era
        self.evictor = evictor
        self.exclusive = exclusive
        self.host_tier = host_tier
        self.fetch = fetch
        self.token_root = token_root
        self.loads: dict[int, LoadOp] = {}
        self.offloads = Offloads()
        self.saves: dict[int, Saving] = {}
        self.evicted = self.rescued = self.overdue_loads = 0
        self.evicting = 0  # blocks evicted since this was last set to 0
        self.device_hits = self.host_hits = self.storage_hits = 0
        self.ops = count(1)
        self.clears = 0  # ClearHost sent to this incarnation of the host tier

    @on(Prefetch)
    def prefetch(self, message: Prefetch, envelope: Envelope[Done]) -> None:
        """Ask for what the device lacks; the host tier knows what it has itself."""
        path, limit = message.path, self.index.match_limit(message.path)
        run = self.index.tree.peek(path, limit)[0]
        limit = min(limit, self.fetchable(path))
        wanted = max(0, limit - run)
        if wanted:
            lineages = self.lineages.of_path(path, 0, limit)
            self.tell(
                self.evictor,
                PrefetchToHost(path.root, path.keys(0, limit), run, message.deadline, lineages),
            )
        self.answer(envelope, Done(wanted))

    def storable(self, path: Path) -> int:
        """Leading blocks that the store can tell from all others: of a store that is addressed by
        tokens alone, those of the scope it was opened with that have no extra keys in their
        path."""
        if self.token_root is None:
            return path.num_full_blocks
        return path.num_plain_blocks if path.root == self.token_root else 0

    def fetchable(self, path: Path) -> int:
        """Leading blocks that may be looked for in the store."""
        return self.storable(path) if self.fetch else 0

    # -- loads: begin

    def begin_loads(self, lease: Lease, segments: Sequence[Segment], *, placed: bool) -> None:
        """Send a Load for each segment nobody loads yet, and join the others. placed: the block
        table has its targets."""
        previous: LoadOp | None = None
        for start, stop, joined in segments:
            if joined is not None:
                joined.sharers.append(lease)
                lease.ops.append(joined)
                previous = joined
                continue
            load = previous = LoadOp(next(self.ops), lease, start, stop, previous)
            if placed:
                self._mark(load, lease)
            lease.ops.append(load)
            self.loads[load.op] = load
            path, blocks = lease.path, tuple(load.blocks)
            fetch = stop <= self.fetchable(path)
            tokens = path.tokens(0, stop) if fetch and self.token_root is not None else b""
            keys, lineages = (
                path.keys(0, stop),
                self.lineages.of_path(path, 0, stop) if fetch else None,
            )
            self.tell(
                self.evictor,
                Load(
                    load.op,
                    path.root,
                    keys,
                    start,
                    blocks,
                    lease.deadline,
                    fetch,
                    tokens,
                    self.era,
                    lineages,
                ),
            )

    def place_loads(self, lease: Lease) -> None:
        """The lease got its blocks: give their targets to the loads that went ahead without."""
        for load in [op for op in lease.ops if op.owner is lease and not op.blocks]:
            try:
                self._mark(load, lease)
            except ValueError:  # somebody else computed or loads one of these meanwhile
                self.cancel_loads(lease, load.start)
                return
            self.tell(self.evictor, Place(load.op, tuple(load.blocks)))

    def cancel_loads(self, lease: Lease, first: int) -> None:
        """Forget the lease's own unplaced loads from position `first` on."""
        for load in [
            op for op in lease.ops if op.owner is lease and not op.blocks and op.start >= first
        ]:
            lease.ops.remove(load)
            del self.loads[load.op]
            self.tell(self.evictor, Cancel(load.op))
        lease.hoped = min(lease.hoped, first)

    def _mark(self, load: LoadOp, lease: Lease) -> None:
        load.nodes = lease.tree.begin_load(lease.path, load.start, load.stop)
        load.blocks = lease.path.blocks(load.start, load.stop)
        for block in load.blocks:
            self.index.loading[block] = load
        load.timer = self.after(max(0.0, lease.deadline - now()) + GRACE, Overdue(load.op))

    # -- loads: end

    @on(Loaded)
    def loaded(self, message: Loaded) -> None:
        """A load is over."""
        load = self.loads.get(message.op)
        if load is not None and load.result is None:
            load.result = (message.good, message.from_host)
            self._judge_all()
            self.room_changed()

    @on(Overdue)
    def overdue(self, message: Overdue) -> None:
        """No answer although the deadline is past: its leases go on in other blocks; the targets
        wait for the answer."""
        load = self.loads.get(message.op)
        if load is None or load.result is not None:
            return
        self.overdue_loads += 1
        load.lost = load.judged = True
        holders = [lease for lease in (load.owner, *load.sharers) if lease is not None]
        load.owner, load.sharers = None, []
        for lease in holders:
            self._leave(lease, load, 0, 0, owner=False)
        self._judge_all()
        self.room_changed()

    def _judge_all(self) -> None:
        """Judge every load whose result is known and whose predecessor is judged, in order."""
        for load in sorted(self.loads.values(), key=lambda one: one.op):
            if load.result is not None and (load.after is None or load.after.judged):
                self._judge(load, *load.result)

    def _judge(self, load: LoadOp, good: int, from_host: int) -> None:
        load.judged = True
        load.after = None
        load.stop_timer()
        del self.loads[load.op]
        for block in load.blocks:
            self.index.loading.pop(block, None)
        if not load.blocks:  # answered before it was placed: there are no nodes of it in the tree
            if load.owner is not None:
                load.owner.ops.remove(load)
                load.owner.hoped = min(load.owner.hoped, load.start)
            return
        orphans = load.tree.finish_load(load.nodes, good)
        landed = len(load.blocks) - len(orphans)
        if load.owner is None:
            self.index.pool.give(orphans)
        if not load.tree.retired:
            if landed:
                self.announced(load.path, load.start, load.start + landed, Reason.LOAD)
            self.discard(load.path.keys(load.start, load.start + good))
        for lease in (load.owner, *load.sharers):
            if lease is not None:
                self._leave(lease, load, landed, from_host, owner=lease is load.owner)

    def _leave(
        self, lease: Lease, load: LoadOp, landed: int, from_host: int, *, owner: bool
    ) -> None:
        """One load less that this lease waits for."""
        lease.ops.remove(load)
        before = lease.path.num_committed
        committed = lease.tree.settle(lease.path)
        host = max(0, min(committed, load.start + from_host) - before)
        lease.host_hits += host
        lease.storage_hits += committed - before - host
        if not owner:
            self._replace_targets(lease, load, load.start + landed)
        if not lease.ops and lease.granted:
            self.lease_ready(lease)

    def _replace_targets(self, lease: Lease, load: LoadOp, first: int) -> None:
        """What did not land stood in blocks that are not this lease's: it gets blocks of its own to
        compute into."""
        targets = set(load.blocks)
        last = min(load.stop, lease.path.num_blocks)
        positions = [
            p
            for p in range(max(first, lease.path.num_committed), last)
            if lease.path.blocks(p, p + 1)[0] in targets
        ]
        self._give_own_blocks(lease, positions)

    def _give_own_blocks(self, lease: Lease, positions: list[int]) -> None:
        """Blocks to compute into, in place of shared ones at these positions; without room the
        lease has a fault."""
        if self.index.free < len(positions):
            self.drop(len(positions) - self.index.free)
        if self.index.free < len(positions):
            lease.fault = lease.fault or Fault(NoRoom, (len(positions), self.index.free))
            for (
                position
            ) in positions:  # the blocks belong to the load: this lease must not give them back
                lease.tree.replace(lease.path, position, -1)
            return
        fresh = self.index.take(len(positions))
        for position, block in zip(positions, fresh, strict=True):
            lease.tree.replace(lease.path, position, block)

    def lease_ready(self, lease: Lease) -> None:
        """Every load of the lease is over: answer its `ready` calls."""
        self._keep_media_whole(lease)
        if lease.counted:
            self.device_hits += lease.device_hits
            self.host_hits += lease.host_hits
            self.storage_hits += lease.storage_hits
        waiting, lease.ready = lease.ready, []
        for envelope in waiting:
            if lease.fault is not None:
                self.refuse(envelope, lease.fault.error())
            else:
                self.answer(envelope, landed(lease, self.index.block_size))

    def _keep_media_whole(self, lease: Lease) -> None:
        """If loads ended within a media item, the request computes all of it, in blocks that are
        not shared."""
        if not lease.media:
            return
        committed = lease.path.num_committed
        kept = self.index.before_media(committed, lease.media)
        if kept == committed or lease.fault is not None:
            return
        self.index.pool.give(lease.tree.retreat(lease.path, kept))
        lease.storage_hits -= (less := min(lease.storage_hits, excess := committed - kept))
        lease.host_hits -= (more := min(lease.host_hits, excess - less))
        lease.device_hits -= excess - less - more
        # Also beyond what is committed: a load may have landed after a position whose load failed
        # and which another request computed.
        table = lease.path.blocks(kept, lease.path.num_blocks)
        self._give_own_blocks(
            lease, [position for position, block in enumerate(table, kept) if block < 0]
        )

    # -- evictions

    def evict(self, wanted: int) -> int:
        """Start to free `wanted` device blocks, at most a part, least recently used first; returns
        how many will be (or are) free."""
        op = self.index.evict(min(wanted, self.part), next(self.ops))
        if not op.total:
            return 0
        self.evicting += op.total
        self.evicted += op.total
        if self.host_tier and self.exclusive:
            self.offloads[op.op] = op
            self.tell(
                self.evictor,
                Offload(
                    op.op, op.keys, op.parents, op.blocks, self.era, self.lineages.of_eviction(op)
                ),
            )
        else:
            self._evict_done(op, bytes(state & HOST for state in op.states))
        return op.total

    def drop(self, wanted: int) -> None:
        """Free device blocks at once, without a copy."""
        op = self.index.evict(wanted, next(self.ops))
        self.evicted += op.total
        self._evict_done(op, bytes(state & HOST for state in op.states))

    @on(Offloaded)
    def offloaded(self, message: Offloaded) -> None:
        """The copies are done: only now are the device blocks free."""
        op = self.offloads.pop(message.op)
        if op is not None:
            self._evict_done(op, message.kept)
            self.room_changed()

    def _evict_done(self, op: EvictOp, on_host: bytes) -> None:
        went, stayed = self.index.finish_evict(op, on_host)
        self.rescued += len(stayed)
        if op.tree.retired:
            return
        for hosted, reason in ((True, Reason.DEVICE_EVICTION), (False, Reason.DEVICE_DROP)):
            self.gone(pick_keys(op.keys, [j for j in went if bool(on_host[j]) is hosted]), reason)
        self.discard(pick_keys(op.keys, [j for j in stayed if on_host[j]]))

    # -- saves and hints

    @on(Admitted)
    def admitted(self, message: Admitted) -> None:
        """A finished request's path is copied: its blocks may go now."""
        save = self.saves.pop(message.op, None)
        if save is None:
            return
        whole = save.whole
        if not whole.tree.retired:
            keys = whole.path.keys(save.start, save.start + len(message.kept))
            whole.tree.host_gained(
                pick_keys(keys, [j for j, kept in enumerate(message.kept) if kept])
            )
        whole.parts -= 1
        if not whole.parts:
            self.give_back_path(whole.tree, whole.path)
        self.room_changed()

    @on(HostGone)
    def host_gone(self, message: HostGone) -> None:
        """The host tier let go of some."""
        self.index.tree.host_gone(message.keys)

    @on(HostGained)
    def host_gained(self, message: HostGained) -> None:
        """The host tier has some more. What it sent before it handled a clear is about blocks that
        are gone by then."""
        if message.clears == self.clears and message.era == self.era:
            self.index.tree.host_gained(message.keys)

    def data_plane_restarted(self) -> None:
        """Host tier and swapper began anew and no copy runs: what was in flight did not arrive,
        what was on the host is gone."""
        for load in self.loads.values():
            if load.result is None:
                load.result = (0, 0)
        for load in [one for one in self.loads.values() if not one.blocks]:
            self._judge(load, 0, 0)
        self._judge_all()
        for op in self.offloads.values():
            self.offloads.pop(op.op)
            self._evict_done(op, bytes(op.total))
        for whole in {save.whole: None for save in self.saves.values()}:
            whole.parts = 0  # nothing more of it is sent
            self.give_back_path(whole.tree, whole.path)
        self.saves.clear()
        self.index.tree.clear_host()
        self.in_parts(self._sweep_host(self.index.tree))
        self.clears = 0
        self.room_changed()

    def _sweep_host(self, tree: BlockTree) -> Iterator[None]:
        """Hints to the host of before its restart: the tree keeps nodes for their sake."""
        while not tree.sweep_host(self.part):
            yield

    # -- telling the evictor

    def discard(self, keys: bytes) -> None:
        """The device holds these (and has said so): an exclusive host tier may let go of them."""
        if keys and self.exclusive and self.host_tier:
            self.index.tree.host_gone(keys)
            self.tell(self.evictor, Discard(keys))


def landed(lease: Lease, block_size: int) -> Landed:
    """The final state of a lease whose loads are over."""
    path = lease.path
    cached = lease.device_hits + lease.host_hits + lease.storage_hits
    return Landed(
        tuple(path.blocks()),
        cached * block_size,
        lease.device_hits,
        lease.host_hits,
        lease.storage_hits,
    )
