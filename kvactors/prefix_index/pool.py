"""The device block pool: the free device blocks, and those with more than one owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvactors.errors import ensure
from kvactors.native import Path
from kvactors.prefix_index.ages import BlockAges

STEP = 512
"""Blocks that a step of a check covers."""


class BlockPool:
    """Free device block ids 0 .. total - 1. A new pool hands out the lowest first, and later the
    block that was returned last.

    A block may have several owners: paths that a fork has made of one, a copy in flight, and the
    tree once one of the paths has committed it. Each returns it once, and it is free with the last.
    """

    __slots__ = ("_free", "_is_free", "_owners", "ages", "changes", "total")

    def __init__(self, total: int, ages: BlockAges | None = None) -> None:
        self.total = total
        self.changes = 0  # calls that changed something
        self.ages = ages  # while a metric asks for them
        self._free = list(range(total - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * total)
        self._owners: dict[int, int] = {}  # beyond the first, by block

    @property
    def free(self) -> int:
        """Blocks in the pool."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free blocks. The caller has made sure that there are as many."""
        if count == 1 and self._free and self.ages is None:  # as most requests that hit
            self.changes += 1
            block = self._free.pop()
            self._is_free[block] = 0
            return [block]
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

    @property
    def num_shared(self) -> int:
        """Blocks with more than one owner."""
        return len(self._owners)

    def is_shared(self, block: int) -> bool:
        """Whether a block has more than one owner."""
        return block in self._owners

    def share(self, blocks: Iterable[int]) -> None:
        """These blocks get one more owner each. RuntimeError for one that is free."""
        self.changes += 1
        for block in blocks:
            if self._is_free[block]:
                raise RuntimeError(f"block {block} is free, and gets an owner")
            self._owners[block] = self._owners.get(block, 0) + 1

    def note_release(self, path: Path) -> None:
        """The request of a path has ended."""
        if self.ages is not None:
            self.ages.released(path.blocks())

    def note_eviction(self, blocks: list[int]) -> None:
        """These blocks have left the device for others."""
        if self.ages is not None and blocks:
            self.ages.evicted(blocks)

    def give(self, blocks: Iterable[int]) -> None:
        """Take blocks back from one owner each. RuntimeError for one that is free already or not of
        this pool: a block that is free and in use means wrong bytes."""
        self.changes += 1
        marks, total = self._is_free, self.total
        for block in self._last_owned(blocks) if self._owners else blocks:
            if not 0 <= block < total:
                raise RuntimeError(f"block {block} is not of this pool")
            if marks[block]:
                raise RuntimeError(f"block {block} was released twice")
            marks[block] = 1
            self._free.append(block)

    def _last_owned(self, blocks: Iterable[int]) -> list[int]:
        """Those of the blocks that nothing owns any more when one owner of each has returned it."""
        last: list[int] = []
        for block in blocks:
            others = self._owners.get(block, 0)
            if not others:
                last.append(block)
            elif others == 1:
                del self._owners[block]
            else:
                self._owners[block] = others - 1
        return last

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
        ensure(not any(marks[block] for block in self._owners), "a block with owners is free")
        for start in range(0, len(self._free), STEP):
            for block in self._free[start : start + STEP]:
                ensure(bool(marks[block]), "free list and marks disagree")
                seen[block] = 1
            yield
        if changes != self.changes:
            return
        ensure(seen == marks, "free list and marks disagree")
        ensure(len(self._free) == marks.count(1), "free list and marks disagree")
