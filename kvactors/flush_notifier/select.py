"""The next batch of a sink: the differences that go into it, the runs that they form, and the flush
tasks of the runs. After every single event the sink's view is a tree (see `ledger`).

Gains come first, the shallowest first, then losses, the deepest first. A batch takes a gain only
together with the gains above it that are still to be sent, and a loss only together with the losses
below it and the gains of the same block.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from kvactors.actor.sliced import Sliced, pace
from kvactors.flush_notifier.blocks import BITS, LAST, REASONS, UNSURE, LedgerBlock, path_to
from kvactors.flush_notifier.messages import ExtraKeys, FlushTask
from kvactors.redact import redacted_repr
from kvactors.types import ALL_TIERS, Reason, Residency, Tier

MAX_RUN_BLOCKS = 32_768
"""Blocks in one task at most. A longer run is sent in parts."""

PATHS = 4
"""A batch of n blocks may carry paths of PATHS x n blocks in all: many short runs deep in the tree
are sent in several batches."""

HASH: Callable[[LedgerBlock], bytes] = attrgetter("hash")
TOKENS: Callable[[LedgerBlock], bytes] = attrgetter("tokens")

TIER_OF = {int(tier): tier for tier in Tier}
"""By bit. `Tier(bit)` takes as long as the rest of a short task."""

TIERS = int(ALL_TIERS)


def gain_of(block: LedgerBlock, sink: int) -> int:
    """The tiers on which to announce a block: due, and not in the sink's view for certain."""
    view = block.views[sink]
    return block.due[sink] & ~(view & ~(view >> UNSURE))


def loss_of(block: LedgerBlock, sink: int) -> int:
    """The tiers on which a removal is to be sent: possibly in the sink's view, and not due."""
    view = block.views[sink]
    return (view | view >> UNSURE) & TIERS & ~block.due[sink]


class BlockRun(NamedTuple):
    """Blocks in path order, each the parent of the next, that change alike on the tier `bit`."""

    blocks: list[LedgerBlock]
    bit: int
    resident: bool
    reason: Reason

    def __repr__(self) -> str:
        return redacted_repr(self)


class Selection:
    """The differences of a sink that go into one batch.

    Attributes:
        gains, losses: sets of tiers by block.
    """

    def __init__(self, dirty: Mapping[LedgerBlock, int], sink: int, limit: int, step: int) -> None:
        self.gains: dict[LedgerBlock, int] = {}
        self.losses: dict[LedgerBlock, int] = {}
        self._dirty = dirty
        self._sink = sink
        self._limit = limit
        self._step = step
        self._over = pace(step)
        self._full = False
        self._gained: LedgerBlock | None = None  # the last one
        self._lost: LedgerBlock | None = None

    def choose(self) -> Iterator[None]:
        """Take about `limit` blocks. A run is taken whole, since each of its parts would carry the
        path from the root."""
        sink, gains, losses, over = self._sink, self.gains, self.losses, self._over
        for block in self._dirty:
            due, view = block.due[sink], block.views[sink]
            if (gain := due & ~(view & ~(view >> UNSURE))) and block not in gains:
                above = block.parent
                if (above is None or above in gains or not gain_of(above, sink)) and len(
                    gains
                ) < self._limit:
                    gains[block] = gain  # the usual case: no gain above it is pending
                    self._gained = block
                else:
                    yield from self._gain(block)
            if (
                (loss := (view | view >> UNSURE) & TIERS & ~due)
                and block not in losses
                and not self._full
            ):
                if (
                    block.child is None
                    and (not gain or block in gains)
                    and len(gains) + len(losses) < self._limit
                ):
                    losses[block] = loss  # the usual case: a leaf
                    self._lost = block
                else:
                    yield from self._lose(block)
            if self._full:
                return
            if over():
                yield

    def _gain(self, block: LedgerBlock) -> Iterator[None]:
        sink, gains = self._sink, self.gains
        chain, above = [block], block.parent
        while above is not None and above not in gains and gain_of(above, sink):
            chain.append(above)
            above = above.parent
            if self._over():
                yield
        if len(gains) + len(self.losses) >= self._limit and above is not self._gained:
            self._full = True
            return
        while chain:
            one = chain.pop()
            gains[one] = gain_of(one, sink)
            if self._over():
                yield
        self._gained = block

    def _lose(self, top: LedgerBlock) -> Iterator[None]:
        """Take a loss, after the losses below it. If there are too many, only as many of them as
        fit."""
        sink, losses = self._sink, self.losses
        node: LedgerBlock = top
        below = top.child
        while True:
            while below is not None and (below in losses or not loss_of(below, sink)):
                below = below.right
                if self._over():
                    yield
            if below is not None:
                node, below = below, below.child
                if self._over():
                    yield
                continue
            if len(self.gains) + len(losses) >= self._limit and (
                self._lost is None or self._lost.parent is not node
            ):
                self._full = True
                return
            if gain_of(node, sink) and node not in self.gains:
                yield from self._gain(node)
                if self._full:
                    return
            losses[node] = loss_of(node, sink)
            self._lost = node
            if self._over():
                yield
            if node is top or node.parent is None:
                return
            node, below = node.parent, node.right

    # -- runs

    def runs(self, *, node: bool, paths: bool) -> Sliced[list[BlockRun]]:
        """The differences as runs, in the order in which they are sent. For a sink that is sent
        paths only the first runs, whose paths are not much longer than the batch."""
        gains: dict[int, list[LedgerBlock]] = {}
        losses: dict[int, list[LedgerBlock]] = {}
        for chosen, of_tier in ((self.gains, gains), (self.losses, losses)):
            for block, tiers in chosen.items():
                for bit in BITS[tiers]:
                    of_tier.setdefault(bit, []).append(block)
                if self._over():
                    yield
        runs: list[BlockRun] = []
        for bit, blocks in gains.items():
            runs += yield from self._join(blocks, bit, resident=True, index=LAST if node else bit)
        # With losses on several tiers a run ends where the set of tiers changes or a branch begins,
        # so that depth alone orders the runs.
        alike = self.losses if len(losses) > 1 else None
        for bit, blocks in losses.items():
            runs += yield from self._join(
                blocks, bit, resident=False, index=LAST if node else bit, alike=alike
            )

        # Gains first: a block that moves between tiers is on one of them in every view between.
        def place(run: BlockRun) -> tuple[bool, int]:
            return not run.resident, run.blocks[0].depth if run.resident else -run.blocks[-1].depth

        runs.sort(key=place)
        if paths:
            left = PATHS * self._limit
            for i, run in enumerate(runs):
                left -= run.blocks[-1].depth
                if i and left < 0:
                    return runs[:i]
        return runs

    def _join(
        self,
        blocks: Collection[LedgerBlock],
        bit: int,
        *,
        resident: bool,
        index: int,
        alike: Mapping[LedgerBlock, int] | None = None,
    ) -> Sliced[list[BlockRun]]:
        """Join blocks into runs. Linear in the number of blocks.

        A run follows the parent chain while the reason stays the same. It ends at a branch and at
        MAX_RUN_BLOCKS. alike: further blocks, each with a value. A branch among them all ends a
        run, and so does another value.
        """
        if len(blocks) == 1:
            return [BlockRun([one], bit, resident, REASONS[one.reasons[index]]) for one in blocks]
        heirs = yield from self._heirs(blocks if alike is None else alike)
        over = pace(self._step)
        runs: list[BlockRun] = []
        for block in blocks:
            if over():
                yield
            number, parent = block.reasons[index], block.parent
            if (
                parent is not None
                and heirs.get(parent) is block
                and parent.reasons[index] == number
                and (alike is None or alike[parent] == alike[block])
            ):
                continue  # part of its parent's run
            run, below = [block], heirs.get(block)
            while (
                below is not None
                and below.reasons[index] == number
                and (alike is None or alike[below] == alike[block])
            ):
                if len(run) == MAX_RUN_BLOCKS:
                    runs.append(BlockRun(run, bit, resident, REASONS[number]))
                    run = []
                run.append(below)
                below = heirs.get(below)
                if over():
                    yield
            runs.append(BlockRun(run, bit, resident, REASONS[number]))
        return runs

    def _heirs(
        self, members: Collection[LedgerBlock]
    ) -> Sliced[dict[LedgerBlock, LedgerBlock | None]]:
        """By member that has children among the members: its only child there, None if there are
        several."""
        over = pace(self._step)
        found: set[LedgerBlock] = set()
        for block in members:
            found.add(block)
            if over():
                yield
        heirs: dict[LedgerBlock, LedgerBlock | None] = {}
        for block in members:
            parent = block.parent
            if parent is not None and parent in found:
                heirs[parent] = None if parent in heirs else block
            if over():
                yield
        return heirs


# -- the flush tasks of runs


class DeliveryBatch(NamedTuple):
    """One delivery: the tasks, and the runs behind them one for one.

    Attributes:
        cleared: not 0 if the only task removes everything: the view of every block numbered up to
            `cleared` goes.
    """

    tasks: list[FlushTask]
    runs: list[BlockRun]
    cleared: int = 0

    def __repr__(self) -> str:
        return redacted_repr(self)

    def split(self, count: int) -> tuple[DeliveryBatch, DeliveryBatch]:
        first = DeliveryBatch(self.tasks[:count], self.runs[:count])
        return first, DeliveryBatch(self.tasks[count:], self.runs[count:], self.cleared)


def as_task(run: BlockRun, epoch: int, *, by_name: bool, step: int) -> Sliced[FlushTask]:
    """The task of a run. by_name: see `Sink.by_name`."""
    first, last = run.blocks[0], run.blocks[-1]
    if by_name and first is last:  # the usual case while blocks come one by one
        tokens = first.tokens if run.resident else b""
        own = run.resident and first.extra_key
        extra_keys: ExtraKeys = ((first.depth - 1, own),) if own else ()
        hashes = first.hash
    else:
        path: list[LedgerBlock] = []  # the blocks whose tokens are sent
        if not by_name:
            path = yield from path_to(last, step)
        elif run.resident:
            path = run.blocks
        tokens = yield from gathered(path, TOKENS, step)
        extra_keys = yield from extra_keys_of(path, step)
        hashes = yield from gathered(run.blocks, HASH, step)
    return FlushTask(
        tokens,
        first.depth - 1,
        len(run.blocks),
        hashes,
        first.parent_hash,
        Residency.RESIDENT if run.resident else Residency.GONE,
        TIER_OF[run.bit],
        run.reason,
        epoch,
        first.scope,
        extra_keys,
    )


def gathered(
    blocks: list[LedgerBlock], field: Callable[[LedgerBlock], bytes], step: int
) -> Sliced[bytes]:
    """A field of all blocks as one buffer."""
    if len(blocks) <= step:
        return b"".join(map(field, blocks))
    whole = bytearray()
    for i in range(0, len(blocks), step):
        whole += b"".join(map(field, blocks[i : i + step]))
        yield
    return bytes(whole)


def extra_keys_of(blocks: list[LedgerBlock], step: int) -> Sliced[ExtraKeys]:
    """(position, extra key) of the blocks that have one."""
    found: list[tuple[int, bytes]] = []
    for i in range(0, len(blocks), step):
        if i:
            yield
        found += [
            (block.depth - 1, block.extra_key) for block in blocks[i : i + step] if block.extra_key
        ]
    return tuple(found)
