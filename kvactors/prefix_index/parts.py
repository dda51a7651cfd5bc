"""How much of a long request one turn handles. What is longer takes several turns, between which
other messages are handled."""

from __future__ import annotations

from collections.abc import Iterator

BLOCKS = 2048
"""Blocks that a turn handles at most: each takes up to a few tenths of a microsecond."""

TOKENS = 131_072
"""Tokens that it handles at most: hashing one takes some nanoseconds."""


def part_of(block_size: int) -> int:
    """Blocks that one turn handles at most, at least one."""
    return max(1, min(BLOCKS, TOKENS // block_size))


def parts(start: int, stop: int, part: int) -> Iterator[tuple[int, int]]:
    """The range [start, stop) as ranges of at most `part`, in ascending order."""
    while start < stop:
        end = min(start + part, stop)
        yield start, end
        start = end
