"""One planted bug: what to replace in which file, what that breaks, and which tests must notice."""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    """file: below kvactors/, or with tests/ below the root. old: must occur there exactly once. catchers: arguments for pytest;
    one of these tests must fail."""

    name: str
    file: str
    old: str
    new: str
    breaks: str
    catchers: tuple[str, ...]
