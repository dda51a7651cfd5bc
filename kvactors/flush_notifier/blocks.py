"""Blocks of the ledger: the tiers of each, the state that each sink acknowledged, and the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvactors.actor.sliced import Sliced
from kvactors.identity import RequestScope
from kvactors.redact import redacted_repr
from kvactors.types import ALL_TIERS, Reason, Tier

UNSURE = 3
"""Bits by which `LedgerBlock.views` shifts the tiers on which an answer was lost."""

BITS = tuple([int(tier) for tier in Tier if tier & tiers] for tiers in range(ALL_TIERS + 1))
"""By set of tiers: its members as numbers (plain ints: arithmetic on flags is slow)."""

LAST = 0
"""Index of `LedgerBlock.reasons` for the last change on any tier. The index of the last change on
one tier is the tier's bit."""

REASONS = tuple(Reason)
"""By the numbers in `LedgerBlock.reasons`."""

REASON_NUMBERS = {reason: number for number, reason in enumerate(REASONS)}


class LedgerBlock:
    """One block whose path is known. Small numbers are in bytearrays, which the cyclic garbage
    collector does not visit: there is one of each block in the tiers.

    Attributes:
        due: per sink, the tiers on which it is to be announced (see `Ledger`).
        views: per sink, the tiers that the sink acknowledged. Above them, shifted by UNSURE, the
            tiers on which an answer was lost: the sink may have them or not.
        pins: references from outside the tree: deliveries in flight, and slices that continue here.
        finished: whether the path of a finished request covers it.
        reasons: numbers in REASONS of the last change, by LAST or by tier.
    """

    __slots__ = (
        *("hash", "parent", "parent_hash", "tokens", "scope", "extra_key", "depth", "children"),
        *("tiers", "due", "views", "pins", "finished", "reasons", "token_addressed"),
        *("child", "left", "right", "number", "before", "after"),
    )

    def __init__(
        self,
        block_hash: bytes,
        parent: LedgerBlock | None,
        parent_hash: bytes,
        tokens: bytes,
        scope: RequestScope,
        sinks: int,
        extra_key: bytes = b"",
    ) -> None:
        self.hash = block_hash
        self.scope = scope
        self.extra_key = extra_key
        self.parent = parent
        self.parent_hash = parent_hash
        self.tokens = tokens
        self.depth: int = parent.depth + 1 if parent is not None else 1
        self.children = self.tiers = self.pins = 0
        self.views = bytearray(sinks)
        self.due = bytearray(sinks)
        self.child: LedgerBlock | None = None
        self.left: LedgerBlock | None = None
        self.right: LedgerBlock | None = None
        self.number = 0
        self.before: LedgerBlock | None = None
        self.after: LedgerBlock | None = None
        self.finished = self.token_addressed = False
        self.reasons = bytearray(1 + max(Tier))

    def idle(self) -> bool:
        """Whether no tier, no sink's view and no delivery has it. Blocks below it may remain."""
        return not (self.tiers or self.pins or any(self.views))

    def unlink(self) -> None:
        """Remove it from the children of its parent. `right` stays, so that a scan that has stopped
        here continues there."""
        above, left, right = self.parent, self.left, self.right
        if above is not None:
            above.children -= 1
            if left is not None:
                left.right = right
            else:
                above.child = right
            if right is not None:
                right.left = left
            self.left = None


class HeldBlock(NamedTuple):
    """One block in a sink's view, for snapshots: `tokens` are its own, `tiers` is a set."""

    hash: bytes
    parent: bytes
    position: int
    tokens: bytes
    tiers: int
    scope: RequestScope
    extra_key: bytes = b""

    def __repr__(self) -> str:
        return redacted_repr(self)


class BlockOrder:
    """Blocks in the order they were added: a linked list that can be scanned in slices while blocks
    come and go. Numbers rise from 1. A removed block has number 0."""

    __slots__ = ("_first", "_last", "last_number")

    def __init__(self) -> None:
        self._first: LedgerBlock | None = None
        self._last: LedgerBlock | None = None
        self.last_number = 0  # given so far

    def add(self, block: LedgerBlock) -> None:
        """Append a new block."""
        self.last_number += 1
        block.number = self.last_number
        block.before = self._last
        if self._last is None:
            self._first = block
        else:
            self._last.after = block
        self._last = block

    def remove(self, block: LedgerBlock) -> None:
        """Remove a block. `after` stays, so that a scan that has stopped here continues there."""
        before, after = block.before, block.after
        if before is None:
            self._first = after
        else:
            before.after = after
        if after is None:
            self._last = before
        else:
            after.before = before
        block.before = None
        block.number = 0

    def up_to(self, number: int) -> Iterator[LedgerBlock]:
        """Blocks with a number of at most `number`, in order. Blocks may be added and removed
        between two of them. A block that is there all the time is yielded once."""
        block = self._first
        while block is not None and block.number <= number:
            if block.number:
                yield block
            block = block.after

    def __iter__(self) -> Iterator[LedgerBlock]:
        """All blocks that are there when the scan begins."""
        return self.up_to(self.last_number)


class LedgerTree:
    """Blocks whose paths are known.

    A block is idle when no tier, no sink's view and no delivery has it. Idle blocks are kept for a
    while, since facts about one block arrive from several actors in any order: a block that left
    one tier may be about to appear on another.

    Attributes:
        order: the same blocks, parents before children.
        idle: idle blocks, the longest idle first.
        version: rises with every slice that may have changed something.
        changing: changes that have slices left, between which differences and the number of idle
            blocks may be inconsistent.
    """

    def __init__(self, idle_limit: int, step: int) -> None:
        self.blocks: dict[bytes, LedgerBlock] = {}
        self.order = BlockOrder()
        self.idle: dict[LedgerBlock, None] = {}
        self.idle_limit = max(1, idle_limit)
        self.step = step
        self.version = self.changing = 0

    def add(self, block: LedgerBlock) -> None:
        """Add a new block below its parent."""
        self.blocks[block.hash] = block
        self.order.add(block)
        above = block.parent
        if above is not None:
            above.children += 1
            block.right = above.child
            if above.child is not None:
                above.child.left = block
            above.child = block

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

    # -- changes

    def begin(self) -> None:
        """A change begins. `end` follows."""
        self.version += 1
        self.changing += 1

    def pause(self) -> Iterator[None]:
        """The end of a slice of a change that refers to no idle block without a pin."""
        yield from self.trim()
        yield
        self.version += 1

    def end(self) -> Iterator[None]:
        """The last slices of a change."""
        if len(self.idle) > self.idle_limit:  # rare: a generator less in most changes
            yield from self.trim()
        self.version += 1
        self.changing -= 1

    def change_all(
        self, change: Callable[[LedgerBlock], object], up_to: int | None = None
    ) -> Iterator[None]:
        """Change every block (numbered up to `up_to` if given), parents before children: what is
        due of the block above is final."""
        scan = self.order if up_to is None else self.order.up_to(up_to)
        for number, block in enumerate(scan, 1):
            change(block)
            if not number % self.step:
                yield from self.pause()

    def trim(self) -> Iterator[None]:
        """Remove the longest idle blocks beyond the limit.

        Runs only at the end of a slice. By then every idle block has been noted, so no block that
        the slice still refers to is removed.
        """
        removed = 0
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
                    removed += 1
                    if not removed % self.step:
                        block.pins += 1
                        yield
                        block.pins -= 1
                        self.version += 1


def path_to(block: LedgerBlock, step: int) -> Sliced[list[LedgerBlock]]:
    """The blocks from the root to a block, in slices."""
    path: list[LedgerBlock] = []
    node: LedgerBlock | None = block
    while node is not None:
        path.append(node)
        node = node.parent
        if not len(path) % step:
            yield
    path.reverse()
    return path
