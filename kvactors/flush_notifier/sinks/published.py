"""Blocks that a sink published to an index that cannot be emptied, so that they can be retracted.

The record outlives the notifier's ledger: it is what a new incarnation, or the next process, must
take back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvactors.discreet import discreet
from kvactors.flush_notifier.messages import FlushTask
from kvactors.types import split_keys


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
    """A path to be removed from `start` on. keys: of the blocks removed. tokens: from the root."""

    keys: list[bytes]
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
            (block := self.blocks.get(key)) is not None and block.resident
            for key in split_keys(task.keys)
        )

    def add_task(self, task: FlushTask) -> None:
        """Add the blocks of a task that is about to be sent."""
        self.add(task.parent, task.start_block_idx, split_keys(task.keys), task.tokens)

    def add(self, parent: bytes, start: int, keys: Sequence[bytes], tokens: bytes) -> None:
        """Add blocks of a path, from position `start`. tokens: from the root."""
        for position, key in enumerate(keys, start):
            block = self.blocks.get(key)
            if block is None:
                above = self.blocks.get(parent)
                first = self.block_bytes * position if above is not None else 0
                own = tokens[first : self.block_bytes * (position + 1)]
                self.blocks[key] = PublishedBlock(parent, position, own, top=above is None)
                if above is not None:
                    above.children += 1
            else:
                block.resident = True
            parent = key

    def remove(self, keys: Iterable[bytes]) -> None:
        """The removal of these blocks was sent."""
        for key in keys:
            block = self.blocks.get(key)
            if block is not None:
                block.resident = False
                self._prune(key)

    def _prune(self, key: bytes) -> None:
        block = self.blocks.get(key)
        while block is not None and not block.resident and not block.children:
            del self.blocks[key]
            key = block.parent
            block = None if block.top else self.blocks[key]
            if block is not None:
                block.children -= 1

    def retractions(self) -> Iterator[Retraction]:
        """Paths whose removal takes everything back, the deepest first. Each block is in one."""
        leaves = [key for key, block in self.blocks.items() if not block.children]
        leaves.sort(key=lambda key: -self.blocks[key].position)
        seen: set[bytes] = set()
        for leaf in leaves:
            chain = self._chain(leaf)
            fresh = next(i for i, key in enumerate(chain) if key not in seen)
            first = next(i for i in range(fresh, len(chain)) if self.blocks[chain[i]].resident)
            seen.update(chain)
            tokens = b"".join(self.blocks[key].tokens for key in chain)
            yield Retraction(chain[first:], self.blocks[chain[first]].position, tokens)

    def _chain(self, key: bytes) -> list[bytes]:
        chain = [key]
        while not self.blocks[key].top:
            key = self.blocks[key].parent
            chain.append(key)
        chain.reverse()
        return chain

    def path_tokens(self, key: bytes) -> bytes:
        """The complete path to a block."""
        return b"".join(self.blocks[one].tokens for one in self._chain(key))

    def __len__(self) -> int:
        return len(self.blocks)
