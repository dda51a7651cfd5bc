"""Loads of blocks to the device, from the host tier or the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvactors.cpu_evictor.messages import Cancel, Load, SetTargets
from kvactors.native import Path
from kvactors.prefix_index.actions import Action, StartTimer
from kvactors.prefix_index.announcements import Announcements
from kvactors.prefix_index.evictions import Evictions
from kvactors.prefix_index.host_victims import HostVictims
from kvactors.prefix_index.index import BlockIndex, Segment, is_past
from kvactors.prefix_index.leases import LeaseTable
from kvactors.prefix_index.lineages import LineageSource
from kvactors.prefix_index.messages import LoadDeadline
from kvactors.prefix_index.records import LeaseState, LoadState
from kvactors.prefix_index.settings import IndexSettings
from kvactors.types import Reason

GRACE = 1.0
"""Seconds past the deadline of a load after which its leases continue without it, in other device
blocks. The evictor answers at the deadline, with the blocks that have arrived. A store that writes
device memory itself (AttentionStore) answers when its call returns: loads from it have no grace."""


class LoadTable:
    """Loads in flight by operation, in the order of their numbers.

    A load is begun for a segment, or joined by further leases. A request that waits for its device
    blocks sends loads ahead, which are placed once it has them, or cancelled. The result of a load
    is applied after those of the loads above it. A load that is overdue keeps its target blocks
    until it is answered, and its leases continue without it.

    Attributes:
        overdue_loads: loads that were overdue so far.
    """

    def __init__(
        self,
        index: BlockIndex,
        leases: LeaseTable,
        evictions: Evictions,
        announcements: Announcements,
        lineages: LineageSource,
        ops: Iterator[int],
        victims: HostVictims,
        settings: IndexSettings,
    ) -> None:
        self.overdue_loads = 0
        self._index = index
        self._leases = leases
        self._evictions = evictions
        self._announcements = announcements
        self._lineages = lineages
        self._ops = ops
        self._victims = victims
        self._settings = settings
        self._loads: dict[int, LoadState] = {}

    def __len__(self) -> int:
        return len(self._loads)

    # -- begin

    def begin(
        self, lease: LeaseState, segments: Sequence[Segment], *, placed: bool
    ) -> list[Action]:
        """Load each segment that is not being loaded, and join the loads of the others. placed: the
        block table has the targets."""
        actions: list[Action] = []
        previous: LoadState | None = None
        for start, stop, joined in segments:
            if joined is not None:
                joined.sharers.append(lease)
                lease.loads.append(joined)
                previous = joined
                continue
            load = previous = LoadState(next(self._ops), lease, start, stop, previous)
            if placed:
                actions.append(self._mark(load, lease))
            lease.loads.append(load)
            self._loads[load.op] = load
            actions += self._messages(load, lease)
        return actions

    def place(self, lease: LeaseState) -> list[Action]:
        """The lease has its blocks: give its loads their targets. If another request has computed
        or loads one of the blocks by now, the loads from there on are cancelled. So are all of them
        if the blocks of the path were cleared: they would be cached and not reported."""
        actions: list[Action] = []
        cleared = is_past(lease.tree, lease.path)  # while it waited for blocks
        for load in self._unplaced(lease, 0):
            if cleared:
                return actions + self.cancel(lease, load.start)
            try:
                actions.append(self._mark(load, lease))
            except ValueError:
                return actions + self.cancel(lease, load.start)
            actions.append(SetTargets(load.op, tuple(load.blocks)))
        return actions

    def cancel(self, lease: LeaseState, first: int) -> list[Action]:
        """Cancel the unplaced loads of a lease from position `first` on."""
        actions: list[Action] = []
        for load in self._unplaced(lease, first):
            lease.loads.remove(load)
            del self._loads[load.op]
            actions.append(Cancel(load.op))
        lease.expected_blocks = min(lease.expected_blocks, first)
        return actions

    def _unplaced(self, lease: LeaseState, first: int) -> list[LoadState]:
        return [
            load
            for load in lease.loads
            if load.owner is lease and not load.blocks and load.start >= first
        ]

    def _messages(self, load: LoadState, lease: LeaseState) -> list[Action]:
        path, stop = lease.path, load.stop
        fetch, by_tokens = stop <= self._settings.fetchable(path), self._is_direct(load)
        victims: list[Action] = []
        if fetch and not self._settings.exclusive:  # what comes from storage stays
            victims = self._victims.before_copies(path, load.start, stop)
        request = Load(
            load.op,
            path.root,
            path.hashes(0, stop),
            load.start,
            tuple(load.blocks),
            lease.deadline,
            fetch,
            path.tokens(0, stop) if by_tokens else b"",
            self._index.memory_generation,
            self._lineages.of_path(path, 0, stop) if fetch else None,
            path.salt,
        )
        return [*victims, request]

    def _is_direct(self, load: LoadState) -> bool:
        """Whether a store that writes device memory itself is asked for the blocks."""
        settings = self._settings
        return settings.token_root is not None and load.stop <= settings.fetchable(load.path)

    def _mark(self, load: LoadState, lease: LeaseState) -> Action:
        load.nodes = lease.tree.begin_load(lease.path, load.start, load.stop)
        load.blocks = lease.path.blocks(load.start, load.stop)
        for block in load.blocks:
            self._index.loading[block] = load
        grace = 0.0 if self._is_direct(load) else GRACE
        return StartTimer(load, lease.deadline, LoadDeadline(load.op), grace)

    # -- end

    def any_unused(self) -> bool:
        """Whether a load, not overdue, is of leases that have all ended: its blocks can be evicted,
        or are free, when it is answered."""
        return any(
            load.owner is None and load.blocks and not (load.sharers or load.lost)
            for load in self._loads.values()
        )

    def paths(self) -> list[Path]:
        """The paths of the loads in flight."""
        return [load.path for load in self._loads.values()]

    def finish(self, op: int, num_loaded: int, from_host: int) -> list[Action] | None:
        """A load is answered.

        Args:
            op: its operation.
            num_loaded: leading blocks that were loaded.
            from_host: blocks of those that came from the host tier.

        Returns:
            The actions. None for an operation that is unknown or was answered before.
        """
        load = self._loads.get(op)
        if load is None or load.result is not None:
            return None
        load.result = (num_loaded, from_host)
        return self._apply_results()

    def overdue(self, op: int) -> list[Action] | None:
        """A load is not answered in time, or stalls: its leases continue in other blocks. None for
        an operation that is unknown, was answered before, or is overdue already."""
        load = self._loads.get(op)
        if load is None or load.result is not None or load.lost:
            return None
        self.overdue_loads += 1
        load.lost = load.completed = True
        leases = load.leases()
        load.owner, load.sharers = None, []
        actions: list[Action] = []
        for lease in leases:
            actions += self._leases.load_ended(lease, load, 0, 0, owner=False)
        return actions + self._apply_results()

    def layers_loaded(self, op: int, layers: int, blocks: int) -> list[Action]:
        """The first `layers` layers of the first `blocks` blocks of a load have arrived."""
        actions: list[Action] = []
        load = self._loads.get(op)
        if load is not None and load.result is None:
            load.layers, load.arriving = layers, blocks
            for lease in load.leases():
                actions += self._leases.answer_layers(lease)
        return actions

    def host_lost(self) -> list[Action]:
        """The host tier has restarted: no load without a result will be answered."""
        actions: list[Action] = []
        for load in self._loads.values():
            if load.result is None:
                load.result = (0, 0)
        for load in [one for one in self._loads.values() if not one.blocks]:
            actions += self._apply(load, 0, 0)
        return actions + self._apply_results()

    def _apply_results(self) -> list[Action]:
        """Apply every result that is known and whose predecessor has completed, in order."""
        actions: list[Action] = []
        for load in list(self._loads.values()):
            after = load.predecessor
            if load.result is not None and (after is None or after.completed):
                actions += self._apply(load, *load.result)
        return actions

    def _apply(self, load: LoadState, num_loaded: int, from_host: int) -> list[Action]:
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
            return []
        # An owner that computes the blocks above again computes these too: they must not be shared.
        lost = load.owner is not None and load.is_below_a_gap(load.owner)
        unused = load.tree.finish_load(load.nodes, 0 if lost else num_loaded)
        resident = len(load.blocks) - len(unused)
        if load.owner is None:
            self._index.pool.give(unused)
        actions: list[Action] = []
        path, start = load.path, load.start
        taken = start if is_past(load.tree, path) else start + resident
        if taken > start:
            actions += self._announcements.cached(path, start, taken, Reason.LOAD)
        actions += self._evictions.drop_host_copies(path.hashes(start, taken))
        # Loaded below blocks that were not: without their parents they are not resident. Or loaded
        # for a path that was cleared: the host may have the same blocks, computed since.
        kept = path.hashes(taken, max(taken, start + num_loaded))
        actions += self._evictions.keep_host_copies(kept)
        for lease in load.leases():
            owner = lease is load.owner
            used = 0 if load.is_below_a_gap(lease) else resident
            actions += self._leases.load_ended(lease, load, used, from_host, owner=owner)
        return actions
