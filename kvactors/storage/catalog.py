"""Keys of a store, in order of use, within a capacity. Pure state, changed on the event loop
only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple


class BatchAdmission(NamedTuple):
    """The admission of a batch: keys to write, keys in the store already, keys that do not fit, and
    keys evicted for the batch."""

    fresh: list[bytes]
    existing: list[bytes]
    refused: list[bytes]
    evicted: list[bytes]


SHARDS = 256
"""Parts that the keys are listed in, by their first byte. Keys are hashes, so the parts are of one
size."""


class Catalog:
    """Keys, least recently used first.

    Attributes:
        capacity: objects at most, 0 for no limit.
        departed: keys that were removed, until the removal is reported.
    """

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity
        self.departed: set[bytes] = set()
        self._names: OrderedDict[bytes, None] = OrderedDict()
        # The same keys once more: an ordered table cannot be listed in steps while it changes.
        self._shards: list[set[bytes]] = [set() for _ in range(SHARDS)]

    def __contains__(self, key: bytes) -> bool:
        return key in self._names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._names)

    def keys(self) -> list[bytes]:
        """Every key, least recently used first."""
        return list(self._names)

    def slices(self) -> Iterator[list[bytes]]:
        """The keys, in parts and in any order. The catalog may change between two parts: a key that
        is in it all the time is in one of them."""
        return (list(self._shards[number]) for number in range(SHARDS))

    def _left(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._shards[key[0]].discard(key)
            self.departed.add(key)

    def admit(self, keys: Sequence[bytes]) -> BatchAdmission:
        """Take a batch in, least recently used first: all of it counts as used now, in that order,
        and none of it is a victim. If the batch alone exceeds the capacity its last names (the root
        side of a path) are taken."""
        keys = list(dict.fromkeys(keys))
        refused: list[bytes] = []
        if self.capacity and len(keys) > self.capacity:
            refused, keys = keys[: -self.capacity], keys[-self.capacity :]
        existing = [key for key in keys if key in self._names]
        for key in keys:
            self._names[key] = None
            self._names.move_to_end(key)
            self._shards[key[0]].add(key)
        evicted: list[bytes] = []
        while self.capacity and len(self._names) > self.capacity:
            evicted.append(self._names.popitem(last=False)[0])
        self._left(evicted)
        there = set(existing)
        return BatchAdmission([key for key in keys if key not in there], existing, refused, evicted)

    def evict(self, busy: Container[bytes]) -> bytes | None:
        """Remove the least recently used key that is not in `busy`, None if there is none."""
        key = next((one for one in self._names if one not in busy), None)
        if key is not None:
            del self._names[key]
            self._left([key])
        return key

    def remove(self, keys: Iterable[bytes]) -> list[bytes]:
        """Remove keys. Returns those that were in the catalog."""
        gone = [key for key in keys if self._names.pop(key, self) is None]
        self._left(gone)
        return gone

    def clear(self) -> None:
        """Remove every key."""
        self.departed.update(self._names)
        self._names.clear()
        self._shards = [set() for _ in range(SHARDS)]

    def run(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of keys in the catalog. They count as used now, the first most
        recently."""
        run = next((i for i, key in enumerate(keys) if key not in self._names), len(keys))
        for key in reversed(keys[:run]):
            self._names.move_to_end(key)
        return run
