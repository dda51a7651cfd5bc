"""Loads of blocks to the device, from the host tier or the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvactors.cpu_evictor.messages import Cancel, LayersLoaded, Load, SetTargets
from kvactors.native import Path
from kvactors.prefix_index.leases import LeaseState, LoadState
from kvactors.prefix_index.messages import LoadDeadline
from kvactors.prefix_index.tree import Segment, was_cleared
from kvactors.types import Reason

if TYPE_CHECKING:
    from kvactors.prefix_index.actor import PrefixIndex


LATE_LOAD_S = 1.0
"""Seconds past the deadline of a load after which its leases continue without it, in other device
blocks. The evictor answers at the deadline, with the blocks that have arrived. A store that writes
device memory itself answers when its call returns: loads from it have no grace."""


class LoadTable:
    """Loads in flight by operation, in the order of their numbers.

    A request that waits for its device blocks sends loads ahead, which are placed once it has them,
    or cancelled. The result of a load is applied after those of the loads above it. A load that is
    overdue keeps its target blocks until it is answered, and its leases continue without it.
    """

    def __init__(self, core: PrefixIndex, ops: Iterator[int]) -> None:
        self.overdue_loads = 0
        self._index, self._out, self._ops = core.index, core.out, ops
        self._leases, self._evictions = core.leases, core.evictions
        self._announcements, self._settings = core.announcements, core.settings
        self._prefill = core.prefill
        self._loads: dict[int, LoadState] = {}

    def __len__(self) -> int:
        return len(self._loads)

    # -- begin

    def begin(self, lease: LeaseState, segments: Sequence[Segment], *, placed: bool) -> None:
        """Load each segment that is not being loaded, and join the loads of the others. placed: the
        block table has the targets."""
        load: LoadState | None = None  # of the segment above
        for start, stop, joined in segments:
            if joined is not None:
                load = joined
                load.sharers.append(lease)
                lease.loads.append(load)
                continue
            op = next(self._ops)
            load = LoadState(op, lease, start, stop, load, lease.tree, lease.path)
            if placed:
                self._mark(load, lease)
            lease.loads.append(load)
            self._loads[op] = load
            self._request(load, lease)

    def place(self, lease: LeaseState) -> None:
        """The lease has its blocks: give its loads their targets. If another request has computed
        or loads one of the blocks by now, the loads from there on are cancelled. So are all of them
        if the blocks of the path were cleared: they would be cached and not reported."""
        cleared = was_cleared(lease.tree, lease.path)  # while it waited for blocks
        for load in self._unplaced(lease, 0):
            if cleared:
                self.cancel(lease, load.start)
                return
            try:
                self._mark(load, lease)
            except ValueError:
                self.cancel(lease, load.start)
                return
            self._out.to_evictor(SetTargets(load.op, tuple(load.blocks)))

    def cancel(self, lease: LeaseState, first: int) -> None:
        """Cancel the unplaced loads of a lease from position `first` on."""
        for load in self._unplaced(lease, first):
            lease.loads.remove(load)
            del self._loads[load.op]
            self._out.to_evictor(Cancel(load.op))
        lease.expected_blocks = min(lease.expected_blocks, first)

    def _unplaced(self, lease: LeaseState, first: int) -> list[LoadState]:
        own = [load for load in lease.loads if load.owner is lease and not load.blocks]
        return [load for load in own if load.start >= first]

    def _request(self, load: LoadState, lease: LeaseState) -> None:
        path, stop = lease.path, load.stop
        fetch, by_tokens = stop <= self._settings.fetchable(path), self._is_direct(load)
        if fetch and not self._settings.exclusive:
            # Blocks read from storage stay on the host: the tier is inclusive.
            self._evictions.name_host_victims_for(path, load.start, stop)
        self._out.to_evictor(
            Load(
                load.op,
                path.root,
                path.hashes(0, stop),
                load.start,
                tuple(load.blocks),
                lease.deadline,
                fetch,
                path.tokens(0, stop) if by_tokens else b"",
                self._index.memory_generation,
                self._announcements.lineages_of_path(path, 0, stop) if fetch else None,
                path.salt,
                self._prefill.seconds(self._index.block_size) if fetch else 0.0,
            )
        )

    def _is_direct(self, load: LoadState) -> bool:
        """Whether a store that writes device memory itself is asked for the blocks."""
        settings = self._settings
        return settings.token_root is not None and load.stop <= settings.fetchable(load.path)

    def _mark(self, load: LoadState, lease: LeaseState) -> None:
        load.nodes = lease.tree.begin_load(lease.path, load.start, load.stop)
        load.blocks = lease.path.blocks(load.start, load.stop)
        for block in load.blocks:
            self._index.loading[block] = load
        grace = 0.0 if self._is_direct(load) else LATE_LOAD_S
        self._out.at(load, lease.deadline, LoadDeadline(load.op), grace=grace)

    # -- end

    def any_unused(self) -> bool:
        """Whether a load, not overdue, is of leases that have all ended: its blocks can be evicted,
        or are free, when it is answered."""
        in_use = (load.leases() or load.lost or not load.blocks for load in self._loads.values())
        return not all(in_use)

    def paths(self) -> list[Path]:
        return [load.path for load in self._loads.values()]

    def finish(self, op: int, num_loaded: int, from_host: int) -> bool:
        """A load is answered: `num_loaded` leading blocks are there, `from_host` of them from the
        host tier. False if it is unknown or was answered before."""
        load = self._loads.get(op)
        if load is None or load.result is not None:
            return False
        load.result = (num_loaded, from_host)
        self._apply_results()
        return True

    def overdue(self, op: int) -> bool:
        """A load is not answered in time, or stalls: its leases continue in other blocks. False if
        it is unknown, was answered before, or is overdue already."""
        load = self._loads.get(op)
        if load is None or load.result is not None or load.lost:
            return False
        self.overdue_loads += 1
        load.lost = load.completed = True
        leases = load.leases()
        load.owner, load.sharers = None, []
        for lease in leases:
            self._leases.load_ended(lease, load, 0, 0, owner=False)
        self._apply_results()
        return True

    def layers_loaded(self, message: LayersLoaded) -> None:
        load = self._loads.get(message.op)
        if load is not None and load.result is None:
            load.layers, load.arriving = message.layers, message.blocks
            for lease in load.leases():
                self._leases.answer_layers(lease)

    def host_lost(self) -> None:
        """The host tier has restarted: no load without a result will be answered."""
        for load in self._loads.values():
            if load.result is None:
                load.result = (0, 0)
        for load in [one for one in self._loads.values() if not one.blocks]:
            self._apply(load, 0, 0)
        self._apply_results()

    def _apply_results(self) -> None:
        """Apply every result that is known and whose predecessor has completed, in order."""
        for load in list(self._loads.values()):
            after = load.predecessor
            if load.result is not None and (after is None or after.completed):
                self._apply(load, *load.result)

    def _apply(self, load: LoadState, num_loaded: int, from_host: int) -> None:
        load.completed = True
        load.predecessor = None
        load.stop_timer()
        del self._loads[load.op]
        for block in load.blocks:
            self._index.loading.pop(block, None)
        if not load.blocks:  # answered before it was placed: it has no nodes in the tree
            if load.owner is not None:
                load.owner.loads.remove(load)
                load.owner.expected_blocks = min(load.owner.expected_blocks, load.start)
            return
        # An owner that computes the blocks above again computes these too: they must not be shared.
        lost = load.owner is not None and load.is_below_a_gap(load.owner)
        unused = load.tree.finish_load(load.nodes, 0 if lost else num_loaded)
        resident = len(load.blocks) - len(unused)
        if load.owner is None:
            self._index.pool.give(unused)
        path, start = load.path, load.start
        taken = start if was_cleared(load.tree, path) else start + resident
        if taken > start:
            self._announcements.cached(path, start, taken, Reason.LOAD)
        self._evictions.drop_host_copies(path.hashes(start, taken))
        # Loaded below blocks that were not: without their parents they are not resident. Or loaded
        # for a path that was cleared: the host may have the same blocks, computed since.
        self._evictions.keep_host_copies(path.hashes(taken, max(taken, start + num_loaded)))
        for lease in load.leases():
            owner = lease is load.owner
            used = 0 if load.is_below_a_gap(lease) else resident
            self._leases.load_ended(lease, load, used, from_host, owner=owner)
