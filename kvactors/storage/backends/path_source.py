"""Paths that the objects of a store form."""

from __future__ import annotations

from kvactors.flush_notifier.messages import PathPart


class PathSource:
    """The source of a store that keeps no lineages: it has no paths."""

    def begin(self) -> None:
        """See `Backend.begin_paths`."""

    async def next(self, most: int) -> list[PathPart] | None:
        """See `Backend.next_paths`."""
        return None

    def end(self) -> None:
        """See `Backend.end_paths`."""
