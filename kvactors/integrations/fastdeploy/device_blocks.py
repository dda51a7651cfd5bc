"""The device blocks of an engine: free, held by the engine, or in the index."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import overload

from kvactors.errors import NoRoom
from kvactors.invariant import ensure


class FreeBlockList(Sequence[int]):
    """A view of the free blocks, for an engine that counts them. The first one is the lowest."""

    def __init__(self, heap: list[int]) -> None:
        self._heap = heap

    def __len__(self) -> int:
        return len(self._heap)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._heap[index]


class DeviceBlocks:
    """Block ids 0 .. total - 1, each in one place. The lowest free id is handed out first.

    Args:
        total: number of blocks.

    Attributes:
        total: number of blocks.
        held: blocks that the engine was given and has not returned, with the request that each was
            given for (None: none named).
        indexed: blocks that the index owns.
        lost: blocks that a copy or a call may still access.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held: dict[int, str | None] = {}
        self.indexed: set[int] = set()
        self.lost: set[int] = set()
        self._free = list(range(total))  # a heap
        self._earlier: dict[int, set[str | None]] = {}  # held when the blocks were reset
        self.free_list = FreeBlockList(self._free)

    @property
    def free(self) -> int:
        """Free blocks."""
        return len(self._free)

    def take(self, count: int, request: str | None) -> list[int]:
        """The lowest free blocks, held for a request.

        Raises:
            NoRoom: fewer are free. Nothing changed.
        """
        if count > len(self._free):
            raise NoRoom(count, len(self._free))
        taken = [heappop(self._free) for _ in range(count)]
        self.held.update(dict.fromkeys(taken, request))
        return taken

    def give(self, blocks: Sequence[int], request: str | None) -> None:
        """The engine returns blocks. Those that it was given before a reset are free already.

        Args:
            blocks: ids.
            request: returns them, None if the engine names none.

        Raises:
            ValueError: the engine does not hold a block, holds it for another request, or returns
                it twice. Nothing changed.
        """
        returned = [block for block in blocks if not self._is_earlier(block, request)]
        self.check_held(returned, request)
        for block in blocks:
            if self._is_earlier(block, request):
                self._earlier[block].discard(request)
        for block in returned:
            del self.held[block]
            heappush(self._free, block)

    def _is_earlier(self, block: int, request: str | None) -> bool:
        """Whether a request was given a block before a reset."""
        if request not in self._earlier.get(block, ()):
            return False
        return block not in self.held or self.held[block] != request

    def check_held(self, blocks: Sequence[int], request: str | None) -> None:
        """Check that the engine holds blocks, each of them once.

        Raises:
            ValueError: it does not, or holds one for another request.
        """
        if len(set(blocks)) < len(blocks):
            raise ValueError(f"a block is named twice: {sorted(blocks)}")
        for block in blocks:
            if block not in self.held:
                raise ValueError(f"block {block} of {self.total} is {self._place(block)}")
            owner = self.held[block]
            if request is not None and owner not in (None, request):
                raise ValueError(f"block {block} is held for request {owner!r}, not {request!r}")

    def _place(self, block: int) -> str:
        if not 0 <= block < self.total:
            return "out of range"
        if block in self.lost:
            return "still in use by a copy"
        return "in the prefix cache, not the engine's" if block in self.indexed else "free already"

    def index(self, blocks: Iterable[int]) -> None:
        """Blocks that the engine holds become the index's."""
        for block in blocks:
            del self.held[block]
            self.indexed.add(block)

    def evict(self, blocks: Iterable[int]) -> None:
        """Blocks of the index are free."""
        for block in blocks:
            self.indexed.remove(block)
            heappush(self._free, block)

    def lose(self, blocks: Iterable[int]) -> None:
        """Blocks, held or indexed until now, may still be accessed: they are nowhere else before
        `regain`, after a reset too."""
        for block in blocks:
            self.held.pop(block, None)
            self.indexed.discard(block)
            self.lost.add(block)

    def regain(self, blocks: Iterable[int]) -> None:
        """Lost blocks are accessed no more, and free."""
        for block in blocks:
            self.lost.remove(block)
            heappush(self._free, block)

    def resize(self, total: int) -> None:
        """Another number of blocks. None is held, indexed or lost."""
        self.total = total
        self._free[:] = range(total)

    def reset(self) -> None:
        """All blocks but lost ones are free. Blocks that the engine holds may be returned later,
        once."""
        for block, request in self.held.items():
            self._earlier.setdefault(block, set()).add(request)
        self.held.clear()
        self.indexed.clear()
        self._free[:] = [block for block in range(self.total) if block not in self.lost]

    def check(self) -> None:
        """AssertionError if a block is in two places, or in none."""
        places = [*self._free, *self.held, *self.indexed, *self.lost]
        ensure(len(places) == self.total, f"{len(places)} places of {self.total} blocks")
        ensure(set(places) == set(range(self.total)), "a block is in two places")
