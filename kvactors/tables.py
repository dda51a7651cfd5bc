"""Hash tables of very many keys that grow and are freed a little at a time.

A dict or set moves all its entries when it grows, and frees all of them at once: 10 to 30 ms for
400,000 keys. These tables consist of many small ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any, Generic, TypeVar

V = TypeVar("V")

SHARDS = 1024
"""Small tables of one large one, a power of two."""

FREED_SHARDS = 4
"""Small tables freed in a step."""


class _Sharded:
    __slots__ = ("shards",)

    shards: list[Any]

    def __len__(self) -> int:
        return sum(map(len, self.shards))

    def free(self) -> Iterator[None]:
        """Free every key, in steps. The table cannot be used any more."""
        while self.shards:
            del self.shards[-FREED_SHARDS:]
            yield


class ShardedDict(_Sharded, Generic[V]):
    """A dict of bytes, as many small ones."""

    __slots__ = ()

    def __init__(self) -> None:
        self.shards: list[dict[bytes, V]] = [{} for _ in range(SHARDS)]

    def of(self, key: bytes) -> dict[bytes, V]:
        """The small dict that has the key, or would have it."""
        return self.shards[hash(key) & (SHARDS - 1)]


class ShardedSet(_Sharded, AbstractSet[bytes]):
    """A set of bytes, as many small ones."""

    __slots__ = ()

    def __init__(self, keys: Iterable[bytes] = ()) -> None:
        self.shards: list[set[bytes]] = [set() for _ in range(SHARDS)]
        self.update(keys)

    def update(self, keys: Iterable[bytes]) -> None:
        shards, mask = self.shards, SHARDS - 1
        for key in keys:
            shards[hash(key) & mask].add(key)

    def __contains__(self, key: object) -> bool:
        return key in self.shards[hash(key) & (SHARDS - 1)]

    def __iter__(self) -> Iterator[bytes]:
        return chain.from_iterable(self.shards)


T = TypeVar("T")


class Unclaimed(Generic[T]):
    """At most `most` connections, in the order of their arrival. The oldest is closed for a new
    one, so that clients that send nothing keep out no other client.
    """

    def __init__(self, most: int, close: Callable[[T], object]) -> None:
        self._most = most
        self._close = close
        self._connections: dict[T, None] = {}

    def __contains__(self, connection: T) -> bool:
        return connection in self._connections

    def __iter__(self) -> Iterator[T]:
        return iter(self._connections)

    def __len__(self) -> int:
        return len(self._connections)

    def add(self, connection: T) -> None:
        while len(self._connections) >= self._most:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            self._close(oldest)
        self._connections[connection] = None

    def discard(self, connection: T) -> None:
        self._connections.pop(connection, None)
