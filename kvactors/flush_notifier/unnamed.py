"""Resident blocks without a path, and the assignment of paths to blocks found in storage.

`BlocksAdded` reports that a block is resident, `PathsFound` the inputs of its hash. A named block
is added to the tree below its parent, or below a root. A block whose parent is not in the tree
waits until the parent is added on any path. It is dropped if it leaves all tiers before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from kvactors.discreet import discreet
from kvactors.flush_notifier.blocks import LAST, REASON_NUMBERS, LedgerBlock
from kvactors.flush_notifier.messages import PathsFound, RequestScope
from kvactors.flush_notifier.tree import LedgerTree
from kvactors.types import Reason, Tier, hash_at

if TYPE_CHECKING:
    from kvactors.flush_notifier.ledger import Ledger

MAX_UNPLACED = 65_536
"""Blocks that wait for a parent at most. Beyond that the oldest is dropped, and stays unannounced
until a request names its path."""


class UnplacedBlock(NamedTuple):
    """The parts of a block hash."""

    parent_hash: bytes
    tokens: bytes
    extra_key: bytes
    scope: RequestScope

    def __repr__(self) -> str:
        return discreet(self)


class UnnamedBlocks:
    """Resident blocks that are not in the ledger's tree.

    Attributes:
        tiers: the set of tiers that hold each. There are as many as resident blocks at most.
        unplaced: those of them whose hash is known, and whose parent is not in the tree.
        placeable: hashes added to the tree since, below which unplaced blocks wait.
    """

    def __init__(self) -> None:
        self.tiers: dict[bytes, int] = {}
        self.unplaced: dict[bytes, UnplacedBlock] = {}
        self.placeable: deque[bytes] = deque()
        self._below: dict[bytes, dict[bytes, None]] = {}  # hashes of unplaced blocks, by parent

    def __len__(self) -> int:
        return len(self.tiers)

    def gain(self, block_hash: bytes, bit: int) -> None:
        """A tier holds this block."""
        self.tiers[block_hash] = self.tiers.get(block_hash, 0) | bit

    def lose(self, block_hash: bytes, bit: int) -> None:
        """A tier no longer holds this block. A block on no tier is dropped."""
        if left := self.tiers.pop(block_hash, 0) & ~bit:
            self.tiers[block_hash] = left
        else:
            self.drop(block_hash)

    def clear(self, bit: int, step: int) -> Iterator[None]:
        """A tier holds nothing. Steps of `step` blocks, with no other change between them."""
        nowhere: list[bytes] = []
        for i, (block_hash, tiers) in enumerate(self.tiers.items(), 1):
            if tiers & ~bit:
                self.tiers[block_hash] = tiers & ~bit
            else:
                nowhere.append(block_hash)
            if not i % step:
                yield
        for i, block_hash in enumerate(nowhere, 1):
            del self.tiers[block_hash]
            self.drop(block_hash)
            if not i % step:
                yield

    def place(self, block_hash: bytes) -> int:
        """Remove a block that is added to the tree. Blocks that wait for it become placeable.

        Returns:
            The tiers that hold it.
        """
        if self.unplaced:
            self.drop(block_hash)
            if block_hash in self._below:
                self.placeable.append(block_hash)
        return self.tiers.pop(block_hash, 0)

    def wait(self, block_hash: bytes, block: UnplacedBlock) -> None:
        """Keep an unplaced block, and drop the oldest if there are too many."""
        self.drop(block_hash)
        if len(self.unplaced) >= MAX_UNPLACED:
            self.drop(next(iter(self.unplaced)))
        self.unplaced[block_hash] = block
        self._below.setdefault(block.parent_hash, {})[block_hash] = None

    def drop(self, block_hash: bytes) -> UnplacedBlock | None:
        """Remove and return the inputs of an unplaced block's hash."""
        block = self.unplaced.pop(block_hash, None)
        if block is not None:
            below = self._below[block.parent_hash]
            del below[block_hash]
            if not below:
                del self._below[block.parent_hash]
        return block

    def next_placeable(self, tree: LedgerTree) -> tuple[bytes, LedgerBlock, UnplacedBlock] | None:
        """Take one unplaced block whose parent has been added: its hash, its parent, and itself.
        None if there is no such block."""
        while self.placeable:
            parent_hash = self.placeable[0]
            block_hash = next(iter(self._below.get(parent_hash, ())), None)
            parent = tree.blocks.get(parent_hash)
            if (
                block_hash is not None
                and parent is not None
                and (block := self.drop(block_hash)) is not None
            ):
                return block_hash, parent, block
            self.placeable.popleft()
        return None

    def fault(self, block_hash: bytes, tree: LedgerTree) -> str:
        """The inconsistency of an unplaced block, empty without one."""
        block = self.unplaced[block_hash]
        if block_hash not in self._below.get(block.parent_hash, ()):
            return "an unplaced block is missing among those of its parent"
        if block_hash not in self.tiers:
            return "an unplaced block is on no tier, or in the tree"
        if block.parent_hash in tree.blocks and block.parent_hash not in self.placeable:
            return "an unplaced block waits for a parent that is in the tree"
        return ""


def name_blocks(ledger: Ledger, message: PathsFound) -> Iterator[None]:
    """Add resident blocks to the tree whose parents are there. Steps of about `step` blocks."""
    looked, tree, unnamed = 0, ledger.tree, ledger.unnamed
    for part in message.parts:
        extra_keys, parent_hash = dict(part.extra_keys), part.parent
        is_root = parent_hash in message.roots
        size = len(part.tokens) // part.blocks
        for i in range(part.blocks):
            block_hash = hash_at(part.hashes, i)
            if block_hash in unnamed.tiers and size == ledger.block_bytes:
                tokens, extra_key = part.tokens[i * size : (i + 1) * size], extra_keys.get(i, b"")
                block = UnplacedBlock(parent_hash, tokens, extra_key, part.scope)
                parent = tree.blocks.get(parent_hash)
                if parent is not None or (is_root and not i):
                    place_block(ledger, block_hash, parent, block)
                else:
                    unnamed.wait(block_hash, block)
            parent_hash = block_hash
            looked += 1
            if not looked % tree.step:
                yield from place_blocks(ledger)
                yield
                tree.version += 1
    yield from place_blocks(ledger)


def place_block(
    ledger: Ledger, block_hash: bytes, parent: LedgerBlock | None, block: UnplacedBlock
) -> None:
    """Add a resident block to the tree. It has no children yet. It counts as covered by a finished
    request, since one brought it to storage."""
    ledger.tree.version += 1
    added = ledger.learn(
        block_hash, parent, block.parent_hash, block.tokens, block.scope, block.extra_key
    )
    added.finished = True
    added.reasons[LAST] = added.reasons[int(Tier.STORAGE)] = REASON_NUMBERS[Reason.STORED]
    ledger.update(added)


def place_blocks(ledger: Ledger) -> Iterator[None]:
    """Add the unplaced blocks whose parents have been added, and the blocks below them."""
    looked = 0
    while (found := ledger.unnamed.next_placeable(ledger.tree)) is not None:
        place_block(ledger, *found)
        looked += 1
        if not looked % ledger.tree.step:
            yield
