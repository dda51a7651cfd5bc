"""The device block pool: which device blocks nobody owns."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Free device block ids 0 .. total - 1. A fresh pool hands out the lowest first; a returned block is reused first."""

    __slots__ = ("_free", "_is_free", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * total)

    @property
    def free(self) -> int:
        """Blocks nobody owns."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks; the caller has made sure that there are as many."""
        assert 0 <= count <= len(self._free), f"{count} blocks wanted, {len(self._free)} free"
        if not count:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for block in taken:
            self._is_free[block] = 0
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Take blocks back. AssertionError for one that is free already or was never ours."""
        for block in blocks:
            assert 0 <= block < self.total, f"block {block} is not of this pool"
            assert not self._is_free[block], f"block {block} was given back twice"
            self._is_free[block] = 1
            self._free.append(block)

    def free_blocks(self) -> list[int]:
        """The free ids (a copy)."""
        return list(self._free)

    def check(self) -> None:
        """AssertionError if list and marks disagree."""
        assert sorted(self._free) == [b for b in range(self.total) if self._is_free[b]], "free list and marks disagree"
