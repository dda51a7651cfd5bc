"""The ledger's tree of blocks, and its retention of unreferenced blocks."""

from __future__ import annotations

from collections.abc import Iterator

from kvactors.flush_notifier.blocks import BlockOrder, LedgerBlock


class LedgerTree:
    """Blocks whose paths are known.

    A block is idle when no tier, no sink's view and no delivery has it. Idle blocks are kept for a
    while, since facts about one block arrive from several actors in any order: a block that left
    one tier may be about to appear on another.

    Attributes:
        blocks: by block hash.
        order: the same blocks, parents before children.
        idle: idle blocks, the longest idle first.
        step: blocks processed in one step.
        version: rises with every step that may have changed something.
        trimming, settling, spreading: calls of `trim`, ends of deliveries, and changes on their way
            to the blocks below, that have steps left.
    """

    def __init__(self, idle_limit: int, step: int) -> None:
        self.blocks: dict[bytes, LedgerBlock] = {}
        self.order = BlockOrder()
        self.idle: dict[LedgerBlock, None] = {}
        self.idle_limit = max(1, idle_limit)
        self.step = step
        self.version = 0
        self.trimming = self.settling = self.spreading = 0

    def add(self, block: LedgerBlock) -> None:
        """Add a new block below its parent."""
        self.blocks[block.hash] = block
        self.order.add(block)
        block.link()

    def note_idle(self, block: LedgerBlock) -> None:
        """Put an idle block at the end of the idle blocks. A block that comes back into use leaves
        them when `trim` reaches it."""
        self.idle.pop(block, None)
        self.idle[block] = None

    def unpin(self, block: LedgerBlock) -> None:
        """Release one reference from outside the tree."""
        block.pins -= 1
        if not block.tiers and block.idle():
            self.note_idle(block)

    def trim(self) -> Iterator[None]:
        """Remove the longest idle blocks beyond the limit.

        Runs only at the end of a step. By then every idle block has been noted, so no block that
        the step still refers to is removed.
        """
        if len(self.idle) <= self.idle_limit:
            return
        self.trimming += 1
        self.version += 1
        done = 0
        while len(self.idle) > self.idle_limit:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            block: LedgerBlock | None = oldest
            while (
                block is not None and not block.children and block.idle() and block not in self.idle
            ):
                del self.blocks[block.hash]
                self.order.remove(block)
                block.unlink()
                block = block.parent
                if block is not None:
                    done += 1
                    if not done % self.step:
                        block.pins += 1
                        yield
                        block.pins -= 1
                        self.version += 1
        self.trimming -= 1
