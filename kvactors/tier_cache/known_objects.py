"""The objects that a store is known to hold, by name. Changed by the thread of the store and by
callers, each change in one step of the interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvactors.tier_cache.storage_jobs import StorageJob

KNOWN = 65_536
"""Objects at most that are known to be in a store that lists none. Beyond that the oldest is
forgotten, and the store is asked again."""


class KnownObjects:
    """Names of objects, and the keys of those that this process has used.

    Attributes:
        lists: whether the store lists its objects, so that the names are complete.
        generation: clears so far.
    """

    def __init__(self) -> None:
        self.lists = True
        self.generation = 0
        self._names: dict[bytes, None] = {}
        self._keys: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._names)

    @property
    def keys_kept(self) -> int:
        """Names whose keys are kept."""
        return len(self._keys)

    def open(self, names: Iterable[bytes], *, lists: bool) -> None:
        """The store was opened with these objects."""
        self.lists = lists
        self._names = dict.fromkeys(names)

    def names(self) -> list[bytes]:
        """The names of the objects that are known to be there."""
        return list(self._names)

    def remove(self, names: Iterable[bytes]) -> None:
        """Objects are erased."""
        for name in names:
            self._names.pop(name, None)
            self._keys.pop(name, None)

    def holds(self, name: bytes, key: bytes) -> bool:
        """Whether an object is known to be there."""
        if name not in self._names:
            return False
        self._keys[name] = key
        return True

    def use(self, names: Sequence[bytes], keys: Sequence[bytes]) -> None:
        """A job uses these objects."""
        self._keys.update(zip(names, keys, strict=True))

    def ended(self, job: StorageJob, ok: Sequence[bool], removed: Sequence[bytes]) -> list[bytes]:
        """A job has ended.

        Args:
            job: the job.
            ok: one bool a key.
            removed: names that left the store.

        Returns:
            The keys that left the store, as far as this process has used them.
        """
        if job.generation == self.generation:
            self._note(job, [name for name, good in zip(job.names, ok, strict=True) if good])
            for name in removed:
                self._names.pop(name, None)
        gone = [self._keys.pop(name) for name in removed if name in self._keys]
        for name in job.names:
            if name not in self._names:
                self._keys.pop(name, None)
        return gone

    def _note(self, job: StorageJob, good: Sequence[bytes]) -> None:
        """Objects were written or found. One of a store that lists none, and that could not be
        read, may be gone."""
        if job.kind == "store" or (job.kind == "lookup" and not self.lists):
            self._names.update(dict.fromkeys(good))
        if self.lists:
            return
        if job.kind != "store":
            for name in set(job.names).difference(good):
                self._names.pop(name, None)
        while len(self._names) > KNOWN:
            name = next(iter(self._names))
            del self._names[name]
            self._keys.pop(name, None)

    def clear(self) -> list[bytes]:
        """The store is emptied. Returns the keys that it held, as far as this process has used
        them."""
        names, self._names = self._names, {}
        self.generation += 1
        return [self._keys.pop(name) for name in list(names) if name in self._keys]
