"""Hash tables of very many keys that grow and are freed a little at a time.

A dict or set moves all its entries when it grows, and frees all of them at once: 10 to 30 ms for
400,000 keys. These tables consist of many small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, Generic, TypeVar

V = TypeVar("V")

SHARDS = 1024
"""Small tables of one large one, a power of two."""

FREED = 4
"""Small tables freed in a step."""


class ShardedDict(Generic[V]):
    """A dict of bytes, as many small ones."""

    __slots__ = ("shards",)

    def __init__(self) -> None:
        self.shards: list[dict[bytes, V]] = [{} for _ in range(SHARDS)]

    def of(self, key: bytes) -> dict[bytes, V]:
        """The small dict that has the key, or would have it."""
        return self.shards[hash(key) & (SHARDS - 1)]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def free(self) -> Iterator[None]:
        """Free every entry, in steps. The dict cannot be used any more."""
        yield from _free(self.shards)


class ShardedSet(AbstractSet[bytes]):
    """A set of bytes, as many small ones."""

    __slots__ = ("shards",)

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self.shards: list[set[bytes]] = [set() for _ in range(SHARDS)]
        self.update(keys)

    def update(self, keys: Iterable[bytes]) -> None:
        """Add keys."""
        shards, mask = self.shards, SHARDS - 1
        for key in keys:
            shards[hash(key) & mask].add(key)

    def __contains__(self, key: object) -> bool:
        return key in self.shards[hash(key) & (SHARDS - 1)]

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self.shards)

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def free(self) -> Iterator[None]:
        """Free every key, in steps. The set cannot be used any more."""
        yield from _free(self.shards)


def _free(shards: list[Any]) -> Iterator[None]:
    while shards:
        del shards[-FREED:]
        yield
