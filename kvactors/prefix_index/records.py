"""What PrefixIndex remembers of leases and of operations in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.actor import Envelope
from kvactors.actor.actor import Timer
from kvactors.errors import KVActorsError
from kvactors.native import BlockTree, Path


class Fault(NamedTuple):
    """Why a lease cannot be used any more. An exception is made for each caller: a raised one keeps
    its frames alive, and with them the lease."""

    kind: type[KVActorsError]
    arguments: tuple[Any, ...]

    def error(self) -> KVActorsError:
        """A new exception."""
        return self.kind(*self.arguments)


class Lease:
    """One request's hold on its blocks.

    media: (offset, length) of items that are cached whole or not at all. counted: whether
    statistics count it (not if it was preempted before).

    path: tokens, names, nodes and block table. tree: the tree its nodes are in (retired by a
    clear). ops: loads it waits for. hoped: leading blocks that are cached if every load lands.
    fault: why `ready` must fail, if it must. layers: who waits for which layer. granted: it has its
    blocks (one that waits for room may have loads, too).
    """

    __slots__ = (
        "counted",
        "deadline",
        "device_hits",
        "fault",
        "granted",
        "hoped",
        "host_hits",
        "id",
        "layers",
        "media",
        "ops",
        "path",
        "ready",
        "request_id",
        "storage_hits",
        "tree",
    )

    def __init__(
        self, lease: int, request_id: str, path: Path, tree: BlockTree, deadline: float
    ) -> None:
        self.id = lease
        self.request_id = request_id
        self.path = path
        self.tree = tree
        self.deadline = deadline
        self.ops: list[LoadOp] = []
        self.ready: list[Envelope[Any]] = []
        self.layers: list[tuple[int, Envelope[int]]] = []
        self.hoped = 0
        self.device_hits = self.host_hits = self.storage_hits = 0
        self.granted = False
        self.fault: Fault | None = None
        self.media: tuple[tuple[int, int], ...] = ()
        self.counted = True


class LoadOp:
    """One run of blocks on its way to the device. Its owner took the target blocks; others may
    share them.

    path: the owner's, which outlives its lease here. start: position of the first block (the same
    on every sharer's path). blocks: targets, empty until placed. after: an earlier load that must
    be judged first, because a block without its parent is of no use. result: (good, from host) once
    known. lost: overdue, so its leases went on without it. layers, arriving: how many layers of how
    many blocks are there.
    """

    __slots__ = (
        "after",
        "arriving",
        "blocks",
        "judged",
        "layers",
        "lost",
        "nodes",
        "op",
        "owner",
        "path",
        "result",
        "sharers",
        "start",
        "stop",
        "timer",
        "tree",
    )

    def __init__(self, op: int, owner: Lease, start: int, stop: int, after: LoadOp | None) -> None:
        self.op = op
        self.tree = owner.tree
        self.path = owner.path
        self.owner: Lease | None = owner
        self.start = start
        self.stop = stop
        self.after = after
        self.nodes: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.blocks: list[int] = []
        self.sharers: list[Lease] = []
        self.result: tuple[int, int] | None = None
        self.judged = self.lost = False
        self.layers = self.arriving = 0
        self.timer: Timer | None = None

    def stop_timer(self) -> None:
        """It is over: its Overdue must not come."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Saved:
    """A finished request's path that is being saved. parts: of it, not yet answered; 0 once the
    evictor has restarted."""

    __slots__ = ("parts", "path", "tree")

    def __init__(self, tree: BlockTree, path: Path, parts: int) -> None:
        self.tree = tree
        self.path = path
        self.parts = parts


class Saving(NamedTuple):
    """A part of it, in one message: blocks from `start` on."""

    whole: Saved
    start: int


class EvictOp(NamedTuple):
    """Device blocks that are leaving: `total` nodes of `tree`, marked with `op`, and what is known
    of them."""

    op: int
    tree: BlockTree
    nodes: NDArray[np.uint32]
    keys: bytes
    parents: bytes
    blocks: tuple[int, ...]
    states: bytes

    @property
    def total(self) -> int:
        """Blocks concerned."""
        return len(self.blocks)


class Offloads:
    """Evictions whose copies to the host are in flight, by operation. coming: device blocks that
    those not stalled will free."""

    def __init__(self) -> None:
        self._ops: dict[int, EvictOp] = {}
        self._stalled: set[int] = set()
        self.coming = 0

    def __setitem__(self, op: int, evict: EvictOp) -> None:
        self._ops[op] = evict
        self.coming += evict.total

    def pop(self, op: int) -> EvictOp | None:
        """Take one out that is over; None if it is not there."""
        evict = self._ops.pop(op, None)
        if op in self._stalled:
            self._stalled.remove(op)
        elif evict is not None:
            self.coming -= evict.total
        return evict

    def stall(self) -> None:
        """Those in flight may never complete."""
        self._stalled = set(self._ops)
        self.coming = 0

    def values(self) -> list[EvictOp]:
        """Those in flight (a copy)."""
        return list(self._ops.values())

    def __len__(self) -> int:
        return len(self._ops)


class Waiting:
    """A request that waits for blocks that evictions in flight will free. `complete` gets them all
    at once.

    ticket, timer: of its deadline. reserves: blocks are not taken for it, but counted in
    `BlockIndex.reserved`; so many as `needed` are, once `complete` is called.
    """

    __slots__ = (
        "complete",
        "envelope",
        "give_up",
        "lease",
        "needed",
        "owed",
        "reserves",
        "taken",
        "ticket",
        "timer",
    )

    def __init__(
        self,
        lease: int,
        envelope: Envelope[Any],
        needed: int,
        complete: Callable[[list[int]], None],
        give_up: Callable[[], None],
        *,
        reserves: bool = False,
    ) -> None:
        self.reserves = reserves
        self.lease = lease
        self.envelope = envelope
        self.needed = needed
        self.owed = needed
        self.taken: list[int] = []
        self.complete = complete
        self.give_up = give_up
        self.ticket = 0
        self.timer: Timer | None = None

    def stop_timer(self) -> None:
        """The wait is over."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Segment(NamedTuple):
    """A run of blocks [start, stop) that can be cached without computing: to be loaded, or being
    loaded by `joined`."""

    start: int
    stop: int
    joined: LoadOp | None


class IndexStatistics(NamedTuple):
    """A moment's picture of PrefixIndex. Hits in blocks, by the tier that held each when it was
    asked for."""

    requests: int
    blocks_looked_up: int
    device_hits: int
    host_hits: int
    storage_hits: int
    no_room: int
    preempted: int
    abandoned: int
    leases: int
    waiting: int
    blocks_total: int
    blocks_free: int
    nodes: int
    nodes_referenced: int
    evictable: int
    evicted: int
    rescued: int  # matched again while they were being offloaded
    loads_in_flight: int
    offloads_in_flight: int
    saves_in_flight: int
    overdue_loads: int
    resumed: int  # preempted before and acquired again: in none of the counts above it
