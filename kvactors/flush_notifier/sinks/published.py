"""Blocks that a sink published to an index that cannot be emptied, so that they can be retracted.

The record outlives the notifier's ledger: it is what a new incarnation, or the next process, must
take back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvactors.discreet import discreet
from kvactors.flush_notifier.messages import FlushTask
from kvactors.types import split_hashes


class PublishedBlock:
    """One block.

    Attributes:
        tokens: its own, or everything from the root if the path above it is not known (`top`).
        resident: whether the index may hold it. Otherwise it is kept for the blocks below it.
    """

    __slots__ = ("children", "parent", "position", "resident", "tokens", "top")

    def __init__(self, parent: bytes, position: int, tokens: bytes, *, top: bool) -> None:
        self.parent = parent
        self.position = position
        self.tokens = tokens
        self.top = top
        self.children = 0
        self.resident = True


class Retraction(NamedTuple):
    """A path to be removed from `start` on.

    Attributes:
        hashes: of its blocks.
        tokens: from the root.
    """

    hashes: list[bytes]
    start: int
    tokens: bytes

    def __repr__(self) -> str:
        return discreet(self)


class PublishedBlocks:
    """Blocks that the index may hold, unacknowledged ones included. Memory is bounded by those
    blocks and their ancestors.

    Attributes:
        blocks: by hash, parents before children.
    """

    def __init__(self, block_size: int) -> None:
        self.block_bytes = 4 * block_size
        self.blocks: dict[bytes, PublishedBlock] = {}

    def holds(self, task: FlushTask) -> bool:
        """Whether every block of a task is resident already."""
        return all(
            (block := self.blocks.get(block_hash)) is not None and block.resident
            for block_hash in split_hashes(task.hashes)
        )

    def add_task(self, task: FlushTask) -> None:
        """Add the blocks of a task that is about to be sent."""
        self.add(task.parent, task.start_block_idx, split_hashes(task.hashes), task.tokens)

    def add(self, parent: bytes, start: int, hashes: Sequence[bytes], tokens: bytes) -> None:
        """Add blocks of a path, from position `start`. tokens: from the root."""
        for position, block_hash in enumerate(hashes, start):
            block = self.blocks.get(block_hash)
            if block is None:
                above = self.blocks.get(parent)
                first = self.block_bytes * position if above is not None else 0
                own = tokens[first : self.block_bytes * (position + 1)]
                self.blocks[block_hash] = PublishedBlock(parent, position, own, top=above is None)
                if above is not None:
                    above.children += 1
            else:
                block.resident = True
            parent = block_hash

    def remove(self, hashes: Iterable[bytes]) -> None:
        """The removal of these blocks was sent."""
        for block_hash in hashes:
            block = self.blocks.get(block_hash)
            if block is not None:
                block.resident = False
                self._prune(block_hash)

    def _prune(self, block_hash: bytes) -> None:
        block = self.blocks.get(block_hash)
        while block is not None and not block.resident and not block.children:
            del self.blocks[block_hash]
            block_hash = block.parent
            block = None if block.top else self.blocks[block_hash]
            if block is not None:
                block.children -= 1

    def retractions(self) -> Iterator[Retraction]:
        """Paths whose removal takes everything back, the deepest first. Each block is in one."""
        leaves = [block_hash for block_hash, block in self.blocks.items() if not block.children]
        leaves.sort(key=lambda block_hash: -self.blocks[block_hash].position)
        seen: set[bytes] = set()
        for leaf in leaves:
            chain = self._chain(leaf)
            fresh = next(i for i, block_hash in enumerate(chain) if block_hash not in seen)
            first = next(i for i in range(fresh, len(chain)) if self.blocks[chain[i]].resident)
            seen.update(chain)
            tokens = b"".join(self.blocks[block_hash].tokens for block_hash in chain)
            yield Retraction(chain[first:], self.blocks[chain[first]].position, tokens)

    def _chain(self, block_hash: bytes) -> list[bytes]:
        chain = [block_hash]
        while not self.blocks[block_hash].top:
            block_hash = self.blocks[block_hash].parent
            chain.append(block_hash)
        chain.reverse()
        return chain

    def path_tokens(self, block_hash: bytes) -> bytes:
        """The complete path to a block."""
        return b"".join(self.blocks[one].tokens for one in self._chain(block_hash))

    def __len__(self) -> int:
        return len(self.blocks)
