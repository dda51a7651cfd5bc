"""The part of a long request that one turn handles. Longer work takes several turns, with other
messages between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvactors.native import Path
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


def hash_first(path: Path, part: int, then: Callable[[], list[Action]]) -> list[Action]:
    """Do something that needs all block hashes of a path. Those of a long path are made in parts
    before."""
    if path.num_full_blocks - path.num_hashed <= part:
        return then()
    return next_part(_hash_parts(path, part, then))


def _hash_parts(path: Path, part: int, then: Callable[[], list[Action]]) -> Work:
    while path.num_full_blocks - path.num_hashed > part:  # both may change between the turns
        path.hashes(path.num_hashed, path.num_hashed + part)
        yield []
    return then()


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
