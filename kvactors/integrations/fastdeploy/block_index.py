"""The device's prefix index: full blocks by block hash, their references, and eviction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from kvactors.invariant import ensure

SLACK = 64
"""Entries of the eviction order beyond twice the blocks. More are stale, and removed."""


class IndexedBlock:
    """A full block on the device.

    Attributes:
        hash: block hash. It stands for the tokens and media up to the block's end.
        parent: the block before it on its path, None for the first.
        depth: blocks of the path up to this one.
        block: device block id.
        refs: requests whose path contains it.
        children: blocks of the index that follow it.
        used: time of the last use, in calls of the index.
    """

    __slots__ = ("block", "children", "depth", "hash", "parent", "refs", "used")

    def __init__(self, block_hash: bytes, parent: IndexedBlock | None, block: int) -> None:
        self.hash = block_hash
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.block = block
        self.refs = 0
        self.children = 0
        self.used = 0


class BlockIndex:
    """Blocks by hash. A block without references and children is evictable: the least recently used
    one leaves first, and of one path the deepest.

    Attributes:
        blocks: by hash.
        unreferenced: blocks that no request holds. All of them can be evicted, one after another.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, IndexedBlock] = {}
        self.unreferenced = 0
        self._order: list[tuple[int, int, int, IndexedBlock]] = []  # a heap, with stale entries
        self._clock = 0
        self._entries = 0

    def tick(self) -> None:
        """A call of the engine begins. Blocks that it uses are equally recent."""
        self._clock += 1

    def match(self, hashes: Sequence[bytes]) -> list[IndexedBlock]:
        """The leading blocks of a path that are indexed."""
        found = []
        for block_hash in hashes:
            block = self.blocks.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Iterable[IndexedBlock]) -> None:
        """A request holds blocks."""
        for block in blocks:
            if not block.refs:
                self.unreferenced -= 1
            block.refs += 1
            block.used = self._clock

    def add(self, block_hash: bytes, parent: IndexedBlock | None, block: int) -> IndexedBlock:
        """Index a block, held by a request. Its hash is not indexed yet."""
        added = IndexedBlock(block_hash, parent, block)
        added.refs, added.used = 1, self._clock
        self.blocks[block_hash] = added
        if parent is not None:
            parent.children += 1
        return added

    def release(self, blocks: Sequence[IndexedBlock]) -> None:
        """A request holds the blocks of its path no more."""
        for block in reversed(blocks):
            block.refs -= 1
            if not block.refs:
                self.unreferenced += 1
                self._enqueue(block)

    def _enqueue(self, block: IndexedBlock) -> None:
        if block.children:
            return
        if len(self._order) > 2 * len(self.blocks) + SLACK:
            self._order = [entry for entry in self._order if self._is_current(entry)]
            heapify(self._order)
        self._entries += 1
        heappush(self._order, (block.used, -block.depth, self._entries, block))

    def _is_current(self, entry: tuple[int, int, int, IndexedBlock]) -> bool:
        used, _, _, block = entry
        if block.refs or block.children or block.used != used:
            return False
        return self.blocks.get(block.hash) is block

    def evict(self, count: int) -> list[IndexedBlock]:
        """Remove blocks, at most `count`, each after its children."""
        victims: list[IndexedBlock] = []
        while len(victims) < count and self._order:
            entry = heappop(self._order)
            if not self._is_current(entry):
                continue
            block = entry[-1]
            victims.append(block)
            del self.blocks[block.hash]
            self.unreferenced -= 1
            parent = block.parent
            if parent is not None:
                parent.children -= 1
                if not parent.refs:
                    self._enqueue(parent)
        return victims

    def clear(self) -> list[IndexedBlock]:
        """Forget every block. Returns them, children before parents."""
        gone = sorted(self.blocks.values(), key=lambda block: -block.depth)
        self.blocks.clear()
        self._order.clear()
        self.unreferenced = 0
        return gone

    def check(self) -> None:
        """AssertionError if references, children and the eviction order disagree."""
        blocks = self.blocks.values()
        ensure(
            self.unreferenced == sum(not block.refs for block in blocks), "unreferenced miscounted"
        )
        leaves = {entry[-1].hash for entry in self._order if self._is_current(entry)}
        for block in blocks:
            children = sum(other.parent is block for other in blocks)
            ensure(block.children == children, f"{block.children} children, not {children}")
            ensure(
                block.parent is None or self.blocks.get(block.parent.hash) is block.parent,
                "a block has a parent that is not indexed",
            )
            ensure(
                block.parent is None or block.parent.refs >= block.refs,
                "a block has more references than its parent",
            )
            evictable = not block.refs and not block.children
            ensure(evictable == (block.hash in leaves), "an evictable block is not in the order")
