"""Reports on a whole store for the notifier, in pages of one turn each. Pure state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import NamedTuple

from kvactors.flush_notifier.messages import PathPart, PathsFound, RequestScope
from kvactors.storage.checked_inventory import CheckedInventory
from kvactors.types import join_hashes

REPORT_PAGE = 1024
"""Keys in one message, and in one turn, of a report on the whole store."""

PATH_PAGE = 256
"""Blocks whose paths are read together and sent in one message."""


class Page(NamedTuple):
    """Joined keys to report: those that the store holds, or those that it lost."""

    held: bytes
    gone: bytes


class ReportPages:
    """A report: first every key that the store lost, then every key that it holds.

    Attributes:
        active: whether a message that continues the report is in the actor's channel.
    """

    def __init__(self, inventory: CheckedInventory) -> None:
        self.active = False
        self._inventory = inventory
        self._snapshot_due = False
        self._unreported: Iterator[bytes] = iter(())

    def restart(self) -> None:
        """Report every key that the store holds, from the first one on."""
        self._snapshot_due = True

    def next(self) -> Page | None:
        """The next page, None at the end. Keys are listed here and not before, so that no earlier
        message of the actor can enter the notifier's channel later."""
        gone = join_hashes(self._inventory.take_removed())
        if gone:
            return Page(b"", gone)
        if self._snapshot_due:
            self._snapshot_due, self._unreported = False, self._inventory.snapshot()
        page = list(islice(self._unreported, REPORT_PAGE))
        if not page:
            return None
        return Page(join_hashes(key for key in page if self._inventory.holds(key)), b"")


class PathReport:
    """Reading of the paths of a store's blocks, and the reports on them to the notifier.

    Attributes:
        active: whether they are being read.

    Args:
        root_of: the root hash that requests of a scope have now. None: paths are not announced.
    """

    def __init__(self, root_of: Callable[[RequestScope], bytes] | None) -> None:
        self.active = False
        self._root_of = root_of
        self._due = self._again = False

    def restart(self) -> None:
        """Read the paths, from the first one on, after the report on the keys."""
        self._due = self._root_of is not None

    def begins(self) -> bool:
        """The keys are reported: whether the reading of paths begins now."""
        if not self._due:
            return False
        self._due = False
        if self.active:
            self._again = True
            return False
        self.active = True
        return True

    def begins_again(self) -> bool:
        """A page was read: whether the reading starts over, because a restart came in between."""
        again, self._again = self._again, False
        return again

    def named(self, parts: tuple[PathPart, ...]) -> PathsFound | None:
        """The message on a page of parts; None if there is nothing to send."""
        root_of = self._root_of
        if not parts or root_of is None:
            return None
        return PathsFound(
            parts,
            frozenset(part.parent for part in parts if root_of(part.scope) == part.parent),
        )
