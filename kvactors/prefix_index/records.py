"""The state of leases and of loads in flight, and the statistics of PrefixIndex."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvactors.actor import Envelope
from kvactors.errors import KVActorsError
from kvactors.hints import Hints
from kvactors.native import BlockTree, Path
from kvactors.prefix_index.actions import Timed
from kvactors.prefix_index.messages import LayerResult


class LeaseFault(NamedTuple):
    """Why a lease can no longer be used.

    A new exception is made for each caller: one that was raised keeps its frames alive, and with
    them the lease.
    """

    kind: type[KVActorsError]
    arguments: tuple[Any, ...]

    def error(self) -> KVActorsError:
        """A new exception."""
        return self.kind(*self.arguments)


class LeaseState(msgspec.Struct, eq=False):
    """A request's hold on its device blocks.

    Attributes:
        path: tokens, hashes, nodes and block table.
        tree: the tree of its nodes, retired by a clear.
        media: (offset, length) in tokens of items that are cached whole or not at all.
        loads: those in flight that it waits for.
        ready: requests to be answered when there is none left.
        layers: the same for one layer.
        expected_blocks: leading blocks that are cached if every load completes.
        granted: it has its blocks. A lease that waits for them may have loads already.
        counted: the statistics count it, as they do unless it was preempted before.
        fault: why it can no longer be used.
        changed: the table has other blocks than it was granted with, in place of blocks that were
            not loaded.
        prompt_tokens: tokens that it was acquired with.
        output_tokens: of the model, if its holder has given their number.
        hints: about the reuse of its blocks, None for none.
        pin_prompt: a pin is of the blocks of its prompt only.
    """

    id: int
    request_id: str
    path: Path
    tree: BlockTree
    deadline: float
    media: tuple[tuple[int, int], ...] = ()
    device_hits: int = 0
    expected_blocks: int = 0
    host_hits: int = 0
    storage_hits: int = 0
    loads: list[LoadState] = []
    ready: list[Envelope[Any]] = []
    layers: list[tuple[int, Envelope[LayerResult]]] = []
    granted: bool = False
    counted: bool = True
    fault: LeaseFault | None = None
    changed: bool = False
    prompt_tokens: int = 0
    output_tokens: int | None = None
    hints: Hints | None = None
    pin_prompt: bool = True

    def output(self) -> int:
        """Tokens that the model has produced, -1 if that is not known."""
        if self.output_tokens is not None:
            return self.output_tokens
        return self.path.num_tokens - self.prompt_tokens or -1


class LoadState(Timed):
    """Consecutive blocks that are being loaded into device blocks of the owner. Other leases may
    share them.

    Attributes:
        owner: the lease that took the target blocks, None once it has ended.
        path: the owner's, which the load keeps.
        start, stop: positions of its blocks, the same on the path of every sharer.
        blocks: targets, empty until the owner has them.
        predecessor: the load of the blocks above, which must complete first: a block without its
            parent cannot be hit.
        result: (blocks loaded, blocks of those from the host tier), once known.
        completed: the result has been applied.
        lost: overdue, and its leases continue without it.
        layers, arriving: so many layers of so many blocks are on the device.
    """

    __slots__ = (
        "arriving",
        "blocks",
        "completed",
        "layers",
        "lost",
        "nodes",
        "op",
        "owner",
        "path",
        "predecessor",
        "result",
        "sharers",
        "start",
        "stop",
        "tree",
    )

    def __init__(
        self, op: int, owner: LeaseState, start: int, stop: int, predecessor: LoadState | None
    ) -> None:
        super().__init__()
        self.op = op
        self.tree = owner.tree
        self.path = owner.path
        self.owner: LeaseState | None = owner
        self.start = start
        self.stop = stop
        self.predecessor = predecessor
        self.nodes: NDArray[np.uint32] = np.empty(0, np.uint32)
        self.blocks: list[int] = []
        self.sharers: list[LeaseState] = []
        self.result: tuple[int, int] | None = None
        self.completed = self.lost = False
        self.layers = self.arriving = 0

    def leases(self) -> list[LeaseState]:
        """The leases that wait for it, the owner first."""
        return [*self.sharers] if self.owner is None else [self.owner, *self.sharers]

    def is_below_a_gap(self, lease: LeaseState) -> bool:
        """Whether a load above this one has failed. The lease computes all blocks from there on.
        Other requests can hit the blocks of this load if one of them has computed those above."""
        return lease.path.num_committed < self.start


class IndexStatistics(NamedTuple):
    """A snapshot of PrefixIndex. Hits are counted in blocks, by the tier that held each when it was
    requested.

    Attributes:
        requests: requests that got their device blocks, each counted once.
        blocks_looked_up: full blocks of their prompts, counted with their hits when the loads of a
            request have ended.
        device_hits: blocks found on the device.
        host_hits: blocks found in host memory.
        storage_hits: blocks found in storage.
        no_room: acquires that were refused with NoRoom.
        refused_size: those of them that need more blocks than the device has.
        refused_pins: those of them that pinned blocks kept out.
        preempted: requests that were preempted.
        abandoned: leases whose holder had gone: cancelled, garbage-collected or left by an
            exception.
        leases: leases in use.
        waiting: requests that wait for device blocks.
        blocks_total: device blocks.
        blocks_free: device blocks that no block of a request is in.
        nodes: blocks in the block tree.
        nodes_referenced: blocks in the tree that a lease or a transfer uses.
        evictable: cached device blocks that no request uses.
        evicted: blocks that left the device for others.
        rescued: blocks that were matched again while they were being offloaded, and stayed.
        loads_in_flight: loads from host memory or storage that have not ended.
        offloads_in_flight: offloads that have not ended.
        saves_in_flight: saves after a request finish that have not ended.
        overdue_loads: loads that missed their deadline.
        resumed: preempted requests that were acquired again, in none of the counts above it.
        forks: leases that `Lease.fork` has made, in none of the counts above it except `leases`.
        tails_copied: device blocks that were copied for them, since they were not full.
        blocks_shared: device blocks with more than one owner: full blocks of forks that are not
            committed by all of them, and blocks that are being copied.
        pinned: device blocks that are pinned.
        pins_refused: pins beyond the share of pinned blocks.
        pins_expired: pins that ended with their time to live.
        quota_evictions: evicted blocks that were chosen because their salt was above its quota.
    """

    requests: int
    blocks_looked_up: int
    device_hits: int
    host_hits: int
    storage_hits: int
    no_room: int
    refused_size: int
    refused_pins: int
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
    rescued: int
    loads_in_flight: int
    offloads_in_flight: int
    saves_in_flight: int
    overdue_loads: int
    resumed: int
    forks: int = 0
    tails_copied: int = 0
    blocks_shared: int = 0
    pinned: int = 0
    pins_refused: int = 0
    pins_expired: int = 0
    quota_evictions: int = 0
