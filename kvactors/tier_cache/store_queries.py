"""Keys that a store is asked about, because it does not list what it holds. Pure state."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvactors.tier_cache.answers import Lookup

ABSENT = 1.0
"""Seconds for which the answer that a store lacks a key is used again."""

KEYS = 65_536
"""Answers kept at most. Beyond that the oldest is forgotten."""


class StoreQueries:
    """Look-ups of a store that several nodes share, or that keeps no list of its objects.

    A key is PENDING while the store is asked. An answer that does not come is a MISS.

    Args:
        timeout: seconds that an answer may take.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._queued: dict[bytes, None] = {}
        self._asked: dict[bytes, float] = {}  # in flight, and when they were submitted
        self._absent: dict[bytes, float] = {}  # up to when the answer is used

    def __len__(self) -> int:
        return len(self._queued) + len(self._asked)

    def is_queued(self, key: bytes) -> bool:
        """Whether a key waits to be asked about."""
        return key in self._queued

    def lookup(self, key: bytes, now: float) -> Lookup:
        """Where a key is that is not known to be stored."""
        if key in self._queued:
            return Lookup.PENDING
        asked = self._asked.get(key)
        if asked is not None:
            return Lookup.PENDING if now - asked < self._timeout + 1.0 else Lookup.MISS
        if now < self._absent.get(key, now):
            return Lookup.MISS
        self._queued[key] = None
        return Lookup.PENDING

    def take(self, now: float) -> list[bytes]:
        """The keys to ask about now, in the order of their look-ups."""
        keys = list(self._queued)
        self._queued.clear()
        self._asked.update(dict.fromkeys(keys, now))
        return keys

    def answered(self, keys: Sequence[bytes], found: Iterable[bool], now: float) -> None:
        """The store has answered."""
        for key, present in zip(keys, found, strict=True):
            self._asked.pop(key, None)
            self._absent.pop(key, None)
            if not present:
                self._absent[key] = now + ABSENT
        while len(self._absent) > KEYS:
            del self._absent[next(iter(self._absent))]

    def stored(self, keys: Iterable[bytes]) -> None:
        """Keys were written."""
        for key in keys:
            self._absent.pop(key, None)

    def clear(self) -> None:
        """Every object was removed."""
        self._queued.clear()
        self._absent.clear()
