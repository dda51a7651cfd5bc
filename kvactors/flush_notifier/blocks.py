"""Blocks of the ledger: the tiers of each, the state that each sink acknowledged, and the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvactors.actor.sliced import Sliced
from kvactors.identity import RequestScope
from kvactors.redact import redacted_repr
from kvactors.types import ALL_TIERS, Reason, Tier

UNSURE = 3  # bits by which `LedgerBlock.views` shifts the tiers on which an answer was lost

BITS = tuple([int(tier) for tier in Tier if tier & tiers] for tiers in range(ALL_TIERS + 1))
"""By set of tiers: its members as numbers (plain ints: arithmetic on flags is slow)."""

LAST = 0  # index of `LedgerBlock.reasons` for the last change on any tier, beside the tiers' bits
REASONS = tuple(Reason)  # by the numbers in `LedgerBlock.reasons`

REASON_NUMBERS = {reason: number for number, reason in enumerate(REASONS)}


HashInputs = tuple[bytes, bytes, bytes, RequestScope]
"""The inputs of a block's hash: parent hash, tokens, extra key and scope."""


class LedgerBlock:
    """One block whose path is known. Small numbers are in bytearrays, which the cyclic garbage
    collector does not visit.

    Attributes:
        due: per sink, the tiers on which it is to be announced (see `Ledger`).
        views: per sink, the tiers that the sink acknowledged. Above them, shifted by UNSURE, the
            tiers on which an answer was lost: the sink may have them or not.
        pins: references from outside the tree: deliveries in flight, and slices that continue here.
        finished: whether the path of a finished request covers it.
        reasons: numbers in REASONS of the last change, by LAST or by tier.
    """

    __slots__ = (
        *("hash", "parent", "parent_hash", "tokens", "scope", "extra_key", "depth"),
        *("tiers", "due", "views", "pins", "finished", "reasons", "token_addressed"),
        *("child", "left", "right", "number", "before", "after"),
    )

    def __init__(
        self, block_hash: bytes, parent: LedgerBlock | None, inputs: HashInputs, sinks: int
    ) -> None:
        self.hash = block_hash
        self.parent = parent
        self.parent_hash, self.tokens, self.extra_key, self.scope = inputs
        self.depth: int = parent.depth + 1 if parent is not None else 1
        self.tiers = self.pins = 0
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


class LedgerTree:
    """Blocks whose paths are known.

    They are also a linked list in the order in which they were added, so parents before children,
    which can be scanned in slices while blocks come and go. Numbers rise from 1, and a removed
    block has number 0.

    A block is idle when no tier, no sink's view and no delivery has it. Idle blocks are kept for a
    while, since facts about one block arrive from several actors in any order: a block that left
    one tier may be about to appear on another.

    Attributes:
        idle: idle blocks, the longest idle first.
        version: rises with every slice that may have changed something.
        changing: changes that have slices left, between which differences and the number of idle
            blocks may be inconsistent.
    """

    def __init__(self, idle_limit: int, step: int) -> None:
        self.blocks: dict[bytes, LedgerBlock] = {}
        self.idle: dict[LedgerBlock, None] = {}
        self.idle_limit = max(1, idle_limit)
        self.step = step
        self.version = self.changing = self.last_number = 0
        self._first: LedgerBlock | None = None
        self._last: LedgerBlock | None = None

    def add(self, block: LedgerBlock) -> None:
        self.blocks[block.hash] = block
        self.last_number += 1
        block.number = self.last_number
        block.before = self._last
        if self._last is None:
            self._first = block
        else:
            self._last.after = block
        self._last = block
        above = block.parent
        if above is not None:
            block.right = above.child
            if above.child is not None:
                above.child.left = block
            above.child = block

    def _remove(self, block: LedgerBlock) -> None:
        """`after` and `right` stay, so that a scan that has stopped here continues there."""
        del self.blocks[block.hash]
        before, after = block.before, block.after
        if before is None:
            self._first = after
        else:
            before.after = after
        if after is None:
            self._last = before
        else:
            after.before = before
        above, left, right = block.parent, block.left, block.right
        if above is not None:
            if left is not None:
                left.right = right
            else:
                above.child = right
            if right is not None:
                right.left = left
        block.before = block.left = None
        block.number = 0

    def scan(self, up_to: int | None = None) -> Iterator[LedgerBlock]:
        """The blocks that are there now, or those numbered up to `up_to`. Blocks may be added and
        removed between two of them. A block that is there all the time is yielded once."""
        last = self.last_number if up_to is None else up_to
        block = self._first
        while block is not None and block.number <= last:
            if block.number:
                yield block
            block = block.after

    def note_idle(self, block: LedgerBlock) -> None:
        """Keep an idle block the longest. A block that comes back into use leaves the idle ones
        when `trim` reaches it."""
        self.idle.pop(block, None)
        self.idle[block] = None

    def unpin(self, block: LedgerBlock) -> None:
        block.pins -= 1
        if not block.tiers and block.idle():
            self.note_idle(block)

    # -- changes

    def begin(self) -> None:
        self.version += 1
        self.changing += 1

    def pause(self) -> Iterator[None]:
        """The end of a slice of a change that refers to no idle block without a pin."""
        yield from self.trim()
        yield
        self.version += 1

    def end(self) -> Iterator[None]:
        if len(self.idle) > self.idle_limit:  # rare: a generator less in most changes
            yield from self.trim()
        self.version += 1
        self.changing -= 1

    def change_all(
        self, change: Callable[[LedgerBlock], object], up_to: int | None = None
    ) -> Iterator[None]:
        """Change every block (or those numbered up to `up_to`), parents before children."""
        self.begin()
        for number, block in enumerate(self.scan(up_to), 1):
            change(block)
            if not number % self.step:
                yield from self.pause()
        yield from self.end()

    def trim(self) -> Iterator[None]:
        """Remove the longest idle blocks beyond the limit. Only at the end of a slice: every idle
        block has been noted by then, so no block that the slice still refers to is removed."""
        removed = 0
        while len(self.idle) > self.idle_limit:
            oldest = next(iter(self.idle))
            del self.idle[oldest]
            block: LedgerBlock | None = oldest
            while (
                block is not None
                and block.child is None
                and block.idle()
                and block not in self.idle
            ):
                self._remove(block)
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
