"""The objects that a store is known to hold, by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvactors.tier_cache.storage_jobs import StorageJob

KNOWN = 65_536
"""Objects at most that are known to be in a store that lists none. Beyond that the oldest is
forgotten, and the store is asked again."""


class KnownObjects:
    """Names of the objects between two clears, and the keys of those that this process has used.

    The store's event loop adds names, any thread looks and removes, each by one operation on a
    dict. A clear puts a new `KnownObjects` in the place of this one, so a job of before the clear
    adds its names to one that no thread asks any more.

    Args:
        names: of the objects that the store lists.
        lists: whether the store lists its objects, so that the names are complete.
    """

    def __init__(self, names: Iterable[bytes] = (), *, lists: bool = True) -> None:
        self.lists = lists
        self._names = dict.fromkeys(names)
        self._keys: dict[bytes, bytes] = {}
        self._added: deque[bytes] = deque()  # the loop's, of a store that lists none

    def __len__(self) -> int:
        return len(self._names)

    @property
    def keys_kept(self) -> int:
        """Names whose keys are kept."""
        return len(self._keys)

    def names(self) -> Iterable[bytes]:
        """The names of the objects that are known to be there now."""
        return self._names.copy()

    def remove(self, names: Iterable[bytes]) -> list[bytes]:
        """Objects are erased. Returns the keys of those that this process has used."""
        gone = []
        for name in names:
            self._names.pop(name, None)
            key = self._keys.pop(name, None)
            if key is not None:
                gone.append(key)
        return gone

    def holds(self, name: bytes, key: bytes) -> bool:
        """Whether an object is known to be there."""
        if name not in self._names:
            return False
        self._keys[name] = key
        return True

    def ended(self, job: StorageJob, ok: Sequence[bool], removed: Sequence[bytes]) -> list[bytes]:
        """A job has ended. Called on the event loop.

        Args:
            job: the job.
            ok: one bool a key.
            removed: names that left the store.

        Returns:
            The keys that left the store, as far as this process has used them.
        """
        found = job.kind == "store" or (job.kind == "lookup" and not self.lists)
        for name, key, good in zip(job.names, job.keys, ok, strict=True):
            if good and found:
                self._add(name)
            elif not (good or self.lists or job.kind == "store"):
                self._names.pop(name, None)  # it could not be read, and may be gone
            if name in self._names:
                self._keys[name] = key
        while len(self._added) > KNOWN:
            self.remove([self._added.popleft()])
        return self.remove(removed)

    def _add(self, name: bytes) -> None:
        if not self.lists and name not in self._names:
            self._added.append(name)
        self._names[name] = None
