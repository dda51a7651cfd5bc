"""Blocks of the ledger: the tiers of each, the state that each sink acknowledged, and the tree.

A block is the number of a row. What is known of it is in columns, arrays that are indexed by the
row, and its hash and tokens are in native memory: about 150 bytes a block of 16 tokens, where an
object with its own values takes 700, and nothing that the cyclic garbage collector visits."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvactors.actor.sliced import Sliced
from kvactors.flush_notifier.messages import GroupLabel
from kvactors.identity import PLAIN, RequestScope
from kvactors.native import BlockRows
from kvactors.redact import redacted_repr
from kvactors.types import ALL_TIERS, Reason, Tier

UNSURE = 3  # bits by which a sink's view shifts the tiers on which an answer was lost

BITS = tuple([int(tier) for tier in Tier if tier & tiers] for tiers in range(ALL_TIERS + 1))
"""By set of tiers: its members as numbers (plain ints: arithmetic on flags is slow)."""

LAST = 0  # index of `LedgerTree.reasons` for the last change on any tier, beside the tiers' bits
REASONS = tuple(Reason)  # by the numbers in `LedgerTree.reasons`

REASON_NUMBERS = {reason: number for number, reason in enumerate(REASONS)}

GROWTH_ROWS = 1_024  # rows by which the columns grow


HashInputs = tuple[bytes, bytes, bytes, RequestScope]
"""The inputs of a block's hash: parent hash, tokens, extra key and scope."""


class HeldBlock(NamedTuple):
    """One block in a sink's view, for snapshots: `tokens` are its own, `tiers` is a set."""

    hash: bytes
    parent: bytes
    position: int
    tokens: bytes
    tiers: int
    scope: RequestScope
    extra_key: bytes = b""
    group: GroupLabel | None = None

    def __repr__(self) -> str:
        return redacted_repr(self)


class LedgerTree:
    """Blocks whose paths are known, and changes of all of them.

    Work on the tree is a generator that yields after every block, and its caller decides how many
    blocks make a slice. The blocks are also a linked list in the order in which they were
    added, so parents before children. Row 0 is both of its ends.

    A block is idle when no tier, no sink's view and no delivery has it. Idle blocks are kept for a
    while, since facts about one block arrive from several actors in any order: a block that left
    one tier may be about to appear on another.

    Attributes:
        rows: hashes and tokens by row. Row 0 is none.
        parent, child, left, right: rows, 0 for none: the block above, the first below, and the
            others below the same block.
        depth: 1 for the first block of a path, 0 for a removed one.
        tiers: the set of tiers that hold the block.
        pins: by block, how many runs of deliveries in flight contain it.
        finished: whether the path of a finished request covers it.
        reasons: by LAST or tier, numbers in REASONS of the last change.
        views: by sink, the tiers that the sink acknowledged. Above them, shifted by UNSURE, the
            tiers on which an answer was lost: the sink may have them or not.
        idle: idle blocks, the longest idle first.
        changing: changes that have blocks left. Until it is 0 no block is removed, differences may
            be inconsistent, and there may be too many idle blocks.
        version: rises with every change.
    """

    def __init__(self, block_bytes: int, idle_limit: int) -> None:
        self.rows = BlockRows(block_bytes)
        self._columns: list[array[int]] = []
        self.parent, self.child = self.column("I"), self.column("I")
        self.left, self.right = self.column("I"), self.column("I")
        self._before, self._after = self.column("I"), self.column("I")
        self.depth, self.tiers = self.column("I"), self.column()
        self.finished, self.token_addressed = self.column(), self.column()
        self.reasons = {index: self.column() for index in (LAST, *BITS[ALL_TIERS])}
        self.views: list[array[int]] = []
        self.pins: dict[int, int] = {}
        self._scopes: list[RequestScope] = [PLAIN]
        self._roots: dict[int, bytes] = {}  # root hashes, by the first block of a path
        self._extra_keys: dict[int, bytes] = {}
        self._free = array("I")
        self._scans: list[list[int]] = []  # of each: the block yielded last, and the last to yield
        self.idle: dict[int, None] = {}
        self.idle_limit = max(1, idle_limit)
        self.version = self.changing = 0

    def column(self, kind: str = "B") -> array[int]:
        """A new column of zeros, of numbers of this kind (see `array`). Only without blocks."""
        self._columns.append(array(kind, (0,)))
        return self._columns[-1]

    def __len__(self) -> int:
        return len(self.rows)

    def find(self, block_hash: bytes) -> int:
        """The block with a hash, 0 if there is none."""
        return self.rows.find(block_hash)

    def parent_hash(self, block: int) -> bytes:
        """The hash of the block above, or the root hash."""
        above = self.parent[block]
        return self.rows.hash(above) if above else self._roots[block]

    def scope(self, block: int) -> RequestScope:
        return self._scopes[block]

    @property
    def has_extra_keys(self) -> bool:
        return bool(self._extra_keys)

    def extra_key(self, block: int) -> bytes:
        return self._extra_keys.get(block, b"")

    def is_idle(self, block: int) -> bool:
        """Whether no tier, no sink's view and no delivery has it. Blocks below it may remain."""
        if self.tiers[block] or block in self.pins:
            return False
        for view in self.views:  # noqa: SIM110  (a generator would cost more)
            if view[block]:
                return False
        return True

    def _new_row(self) -> int:
        if self._free:
            row = self._free.pop()
            for column in self._columns:
                column[row] = 0
            return row
        row = len(self._scopes)
        self._scopes.append(PLAIN)
        if row >= len(self.parent):
            for column in self._columns:
                column.frombytes(bytes(GROWTH_ROWS * column.itemsize))
        return row

    def add(self, block_hash: bytes, parent: int, inputs: HashInputs) -> int:
        """Add a block below another, or, if `parent` is 0, below the root hash in its inputs."""
        parent_hash, tokens, extra_key, scope = inputs
        block = self._new_row()
        self.rows.put(block, block_hash, tokens)
        self._scopes[block] = scope
        if extra_key:
            self._extra_keys[block] = extra_key
        last = self._before[0]
        self._before[block], self._after[last], self._before[0] = last, block, block
        self.depth[block] = self.depth[parent] + 1
        if not parent:
            self._roots[block] = parent_hash
            return block
        self.parent[block] = parent
        self.right[block] = right = self.child[parent]
        if right:
            self.left[right] = block
        self.child[parent] = block
        return block

    def _remove(self, block: int) -> None:
        """Its row is free at once: a scan that has stopped here goes on from the block before."""
        self.rows.erase(block)
        self._scopes[block] = PLAIN
        self._roots.pop(block, None)
        self._extra_keys.pop(block, None)
        before, after = self._before[block], self._after[block]
        self._after[before], self._before[after] = after, before
        for scan in self._scans:
            scan[:] = [before if one == block else one for one in scan]
        above, left, right = self.parent[block], self.left[block], self.right[block]
        if left:
            self.right[left] = right
        elif above:
            self.child[above] = right
        if right:
            self.left[right] = left
        self.depth[block] = 0
        self._free.append(block)

    def scan(self) -> Iterator[int]:
        """The blocks that are there now, parents before children. Blocks may be added and removed
        between two of them. A block that is there all the time is yielded once."""
        after, scan = self._after, [0, self._before[0]]
        self._scans.append(scan)
        try:
            while scan[0] != scan[1]:
                scan[0] = after[scan[0]]
                yield scan[0]
        finally:
            self._scans = [one for one in self._scans if one is not scan]

    def note_idle(self, block: int) -> None:
        """Keep an idle block the longest. A block that comes back into use leaves the idle ones
        when `trim` reaches it."""
        self.idle.pop(block, None)
        self.idle[block] = None

    def pin(self, block: int) -> None:
        self.pins[block] = self.pins.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        if left := self.pins.pop(block) - 1:
            self.pins[block] = left
        elif self.is_idle(block):
            self.note_idle(block)

    # -- changes

    def begin(self) -> None:
        self.version += 1
        self.changing += 1

    def end(self) -> Iterator[None]:
        self.changing -= 1
        if not self.changing and len(self.idle) > self.idle_limit:
            yield from self.trim()

    def change_all(self, change: Callable[[int], object]) -> Iterator[None]:
        """Change every block, parents before children."""
        self.begin()
        for block in self.scan():
            change(block)
            yield
            if len(self.idle) > self.idle_limit and self.changing == 1:
                yield from self.trim()
        yield from self.end()

    def trim(self) -> Iterator[None]:
        """Remove the longest idle blocks beyond the limit, until another change begins: that may
        refer to any block."""
        self.changing += 1
        alone = self.changing
        while len(self.idle) > self.idle_limit and self.changing == alone:
            block = next(iter(self.idle))
            del self.idle[block]
            while not self.child[block] and self.is_idle(block):
                above = self.parent[block]
                self._remove(block)
                if not above or above in self.idle:
                    break
                block = above
                self.pin(block)
                yield
                self.unpin(block)  # if it is idle, it is among the idle ones again
                if self.changing != alone:
                    break
                self.idle.pop(block, None)
            yield
        self.changing -= 1

    def path_to(self, block: int) -> Sliced[list[int]]:
        """The blocks from the root to a block."""
        path: list[int] = []
        while block:
            path.append(block)
            block = self.parent[block]
            yield
        path.reverse()
        return path
