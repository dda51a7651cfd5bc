"""Selection: the differences of a sink that go into its next batch. After every single event the
sink's view is a tree.

Gains come first, the shallowest first, then losses, the deepest first. A batch takes a gain only
together with the gains above it that are still to be sent, and a loss only together with the losses
below it and the gains of the same block. See `Ledger` for the rule that this keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvactors.flush_notifier.blocks import BITS, UNSURE, LedgerBlock
from kvactors.flush_notifier.steps import Steps
from kvactors.types import ALL_TIERS

TIERS = int(ALL_TIERS)


def gain_of(block: LedgerBlock, sink: int) -> int:
    """The tiers on which to announce a block: due, and not in the sink's view for certain."""
    view = block.views[sink]
    return block.due[sink] & ~(view & ~(view >> UNSURE))


def loss_of(block: LedgerBlock, sink: int) -> int:
    """The tiers on which a removal is to be sent: possibly in the sink's view, and not due."""
    view = block.views[sink]
    return (view | view >> UNSURE) & TIERS & ~block.due[sink]


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
        self._looked = 0
        self._full = False
        self._gained: LedgerBlock | None = None  # the last one
        self._lost: LedgerBlock | None = None

    def steps(self) -> Iterator[None]:
        """Take about `limit` blocks. A run is taken whole, since each of its parts would carry the
        path from the root."""
        sink, gains, losses, step = self._sink, self.gains, self.losses, self._step
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
            self._looked += 1
            if self._looked >= step:
                self._looked = 0
                yield

    def _count(self) -> bool:
        """Count one block. Returns whether the step is over."""
        self._looked += 1
        if self._looked < self._step:
            return False
        self._looked = 0
        return True

    def _gain(self, block: LedgerBlock) -> Iterator[None]:
        """Take a gain, after the gains above it."""
        sink, gains = self._sink, self.gains
        chain, above = [block], block.parent
        while above is not None and above not in gains and gain_of(above, sink):
            chain.append(above)
            above = above.parent
            if self._count():
                yield
        if len(gains) + len(self.losses) >= self._limit and above is not self._gained:
            self._full = True
            return
        while chain:
            one = chain.pop()
            gains[one] = gain_of(one, sink)
            if self._count():
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
                if self._count():
                    yield
            if below is not None:
                node, below = below, below.child
                if self._count():
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
            if self._count():
                yield
            if node is top or node.parent is None:
                return
            node, below = node.parent, node.right

    def by_tier(self) -> Steps[tuple[dict[int, list[LedgerBlock]], dict[int, list[LedgerBlock]]]]:
        """Gains and losses as lists of blocks by tier."""
        lists: tuple[dict[int, list[LedgerBlock]], dict[int, list[LedgerBlock]]] = {}, {}
        for chosen, of_tier in zip((self.gains, self.losses), lists, strict=True):
            for block, tiers in chosen.items():
                for bit in BITS[tiers]:
                    of_tier.setdefault(bit, []).append(block)
                if self._count():
                    yield
        return lists
