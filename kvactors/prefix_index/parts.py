"""The part of a long request that one turn handles. Longer work takes several turns, with other
messages between them."""

from __future__ import annotations

from collections.abc import Iterator

from kvactors.prefix_index.actions import Action, Work
from kvactors.prefix_index.messages import Continue

BLOCKS = 2048
"""Blocks that a turn handles at most: each takes up to a few tenths of a microsecond."""

TOKENS = 131_072
"""Tokens that a turn handles at most: hashing one takes some nanoseconds."""


def part_of(block_size: int) -> int:
    """Blocks that one turn handles at most, at least one."""
    return max(1, min(BLOCKS, TOKENS // block_size))


def parts(start: int, stop: int, part: int) -> Iterator[tuple[int, int]]:
    """The range [start, stop) as ranges of at most `part`, in ascending order."""
    while start < stop:
        end = min(start + part, stop)
        yield start, end
        start = end


def next_part(work: Work) -> list[Action]:
    """Do the next part of some work.

    Returns:
        Its actions, and if parts are left the message to itself with which the actor goes on.
    """
    try:
        actions = next(work)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    return [*actions, Continue(work)]
