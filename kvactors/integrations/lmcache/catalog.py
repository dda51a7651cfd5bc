"""The objects of the store by LMCache's keys: order of use, locks, capacity. Pure state of one
thread."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable

from kvactors.integrations.lmcache.objects import Key, StoredObject


class Catalog:
    """Objects, least recently used first. Locked objects are never evicted or removed.

    Args:
        capacity: pages that the objects may have together.

    Attributes:
        used: pages of the objects.
        reserved: pages of objects that are being stored.
        nbytes: bytes of the objects.
        locks: locks of each key, those of loads in flight included.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.reserved = 0
        self.nbytes = 0
        self.locks: Counter[Key] = Counter()
        self._objects: OrderedDict[Key, StoredObject] = OrderedDict()
        self._keys: dict[bytes, Key] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def items(self) -> list[tuple[Key, StoredObject]]:
        """Every key and its object, least recently used first."""
        return list(self._objects.items())

    def get(self, key: Key) -> StoredObject | None:
        """The object of a key, None if there is none."""
        return self._objects.get(key)

    def key_of(self, digest: bytes) -> Key | None:
        """The key of the object with a digest, None if there is none."""
        return self._keys.get(digest)

    def touch(self, keys: Iterable[Key]) -> None:
        """Keys of one prefix were used. The first of them counts as used last: chunks at the end of
        a prefix are evicted before those that they depend on."""
        for key in reversed(list(keys)):
            if key in self._objects:
                self._objects.move_to_end(key)

    def add(self, key: Key, found: StoredObject) -> None:
        """An object is in the store. It must not be in the catalog."""
        self._objects[key] = found
        self._keys[found.digest] = key
        self.used += found.pages
        self.nbytes += found.shape.size

    def remove(self, key: Key) -> StoredObject | None:
        """Remove an object. Returns it, None if there is none."""
        found = self._objects.pop(key, None)
        if found is not None:
            del self._keys[found.digest]
            self.used -= found.pages
            self.nbytes -= found.shape.size
        return found

    def lock(self, key: Key) -> None:
        """Lock an object once more."""
        self.locks[key] += 1

    def unlock(self, key: Key) -> None:
        """Take back one lock. A key without locks is left as it is."""
        if self.locks[key] <= 1:
            del self.locks[key]
        else:
            self.locks[key] -= 1

    def victims(self, pages: int, keep: Container[Key] = ()) -> list[Key] | None:
        """The keys to evict so that an object can be stored, None if it does not fit.

        Args:
            pages: of the object.
            keep: keys that stay.
        """
        needed = self.used + self.reserved + pages - self.capacity
        chosen: list[Key] = []
        for key, found in self._objects.items():
            if needed <= 0:
                break
            if key not in self.locks and key not in keep:
                chosen.append(key)
                needed -= found.pages
        return chosen if needed <= 0 else None
