"""One planted bug: the text to replace in a file, the resulting defect, and the tests that must
fail."""

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
