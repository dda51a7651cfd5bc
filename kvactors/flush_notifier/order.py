"""The order in which a ledger's entries were learned, to go through in steps while entries come and
go."""

from __future__ import annotations

from collections.abc import Iterator

from kvactors.flush_notifier.runs import Entry


class Order:
    """A linked list. Entries have numbers that rise from 1; one that was removed has 0."""

    __slots__ = ("_first", "_last", "last_number")

    def __init__(self) -> None:
        self._first: Entry | None = None
        self._last: Entry | None = None
        self.last_number = 0  # given so far

    def add(self, entry: Entry) -> None:
        """Append a new entry."""
        self.last_number += 1
        entry.number = self.last_number
        entry.before = self._last
        if self._last is None:
            self._first = entry
        else:
            self._last.after = entry
        self._last = entry

    def remove(self, entry: Entry) -> None:
        """Take an entry out. It keeps what came after it: who stands at it goes on there."""
        before, after = entry.before, entry.after
        if before is None:
            self._first = after
        else:
            before.after = after
        if after is None:
            self._last = before
        else:
            after.before = before
        entry.before = None
        entry.number = 0

    def up_to(self, number: int) -> Iterator[Entry]:
        """Entries with a number of at most `number`, in order. Entries may be removed and added in
        between; an entry that is there from the beginning to the end is met once."""
        entry = self._first
        while entry is not None and entry.number <= number:
            if entry.number:
                yield entry
            entry = entry.after
