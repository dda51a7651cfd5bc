"""The device block pool: the free device blocks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvactors.invariant import ensure
from kvactors.native import Path
from kvactors.prefix_index.ages import BlockAges

STEP = 2048
"""Blocks that a step of a check covers."""


class BlockPool:
    """Free device block ids 0 .. total - 1. A new pool hands out the lowest first, and later the
    block that was returned last."""

    __slots__ = ("_free", "_is_free", "ages", "changes", "total")

    def __init__(self, total: int, ages: BlockAges | None = None) -> None:
        self.total = total
        self.changes = 0  # calls that changed something
        self.ages = ages  # while a metric asks for them
        self._free = list(range(total - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * total)

    @property
    def free(self) -> int:
        """Blocks in the pool."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks. The caller has made sure that there are as many."""
        if not 0 <= count <= len(self._free):
            raise RuntimeError(f"{count} blocks wanted, {len(self._free)} free")
        if not count:
            return []
        self.changes += 1
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        for block in taken:
            self._is_free[block] = 0
        if self.ages is not None:
            self.ages.took(taken)
        return taken

    def note_release(self, path: Path) -> None:
        """The request of a path has ended."""
        if self.ages is not None:
            self.ages.released(path.blocks())

    def note_eviction(self, blocks: list[int]) -> None:
        """These blocks have left the device for others."""
        if self.ages is not None and blocks:
            self.ages.evicted(blocks)

    def give(self, blocks: Iterable[int]) -> None:
        """Take blocks back. RuntimeError for one that is free already or not of this pool: a block
        with two owners means wrong bytes."""
        self.changes += 1
        for block in blocks:
            if not 0 <= block < self.total:
                raise RuntimeError(f"block {block} is not of this pool")
            if self._is_free[block]:
                raise RuntimeError(f"block {block} was released twice")
            self._is_free[block] = 1
            self._free.append(block)

    def free_blocks(self) -> list[int]:
        """The free ids (a copy)."""
        return list(self._free)

    def check(self) -> None:
        """AssertionError if list and marks disagree."""
        for _ in self.check_steps():
            pass

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of about a millisecond, between which anything may happen: a block that
        is listed must be marked in any case, and the whole is compared if nothing has changed since
        the check began."""
        changes, marks, seen = self.changes, self._is_free, bytearray(self.total)
        for start in range(0, len(self._free), STEP):
            for block in self._free[start : start + STEP]:
                ensure(bool(marks[block]), "free list and marks disagree")
                seen[block] = 1
            yield
        if changes != self.changes:
            return
        ensure(seen == marks, "free list and marks disagree")
        ensure(len(self._free) == marks.count(1), "free list and marks disagree")
