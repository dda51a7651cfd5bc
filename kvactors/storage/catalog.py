"""Keys of a store that one process owns, in LRU order, and their shares by salt. Pure state,
changed on the event loop only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from types import MappingProxyType
from typing import NamedTuple

from kvactors.errors import ConfigError, ensure
from kvactors.quotas import StorageQuotas


class BatchAdmission(NamedTuple):
    """The admission of a batch: keys to write, keys in the store already, keys that do not fit, and
    keys evicted for the batch."""

    fresh: list[bytes]
    existing: list[bytes]
    refused: list[bytes]
    evicted: list[bytes]


NONE: Mapping[bytes, int | None] = MappingProxyType({})

SHARDS = 256
"""Parts that the keys are listed in, by their first byte. Keys are hashes, so the parts are of one
size."""


class Catalog:
    """Keys, least recently used first."""

    def __init__(self, capacity: int = 0) -> None:
        self.capacity = capacity  # objects at most, 0 for no limit
        self.departed: set[bytes] = set()  # keys whose removal is not reported yet
        self.shares = StoreShares()
        self._names: OrderedDict[bytes, int | None] = OrderedDict()  # with their salts
        # The same keys once more: an ordered table cannot be listed in steps while it changes.
        self._shards: list[set[bytes]] = [set() for _ in range(SHARDS)]

    def __contains__(self, key: bytes) -> bool:
        return key in self._names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._names)

    def slices(self) -> Iterator[list[bytes]]:
        """The keys, in parts and in any order. The catalog may change between two parts: a key that
        is in it all the time is in one of them."""
        return (list(self._shards[number]) for number in range(SHARDS))

    def salt(self, key: bytes) -> int | None:
        """The number of a key's salt (`quotas.salt_id`). None if it is not known, or the key is not
        in the catalog."""
        return self._names.get(key)

    def check(self) -> None:
        self.shares.check()
        known = sum(salt is not None for salt in self._names.values())
        ensure(known == self.shares.counted, "objects by salt disagree")

    def _use(self, key: bytes, salt: int | None) -> None:
        """A key is used, or enters. Its salt is that of its entry."""
        if key in self._names:
            salt = self._names[key]
            self._names.move_to_end(key)
            if salt is not None:
                self.shares.touch(key, salt)
            return
        self._names[key] = salt
        self._shards[key[0]].add(key)
        if salt is not None:
            self.shares.add(key, salt)

    def _drop(self, key: bytes, *, departed: bool = True) -> None:
        salt = self._names.pop(key)
        self._shards[key[0]].discard(key)
        if salt is not None:
            self.shares.remove(key, salt)
        if departed:
            self.departed.add(key)

    def admit(
        self, keys: Sequence[bytes], salts: Mapping[bytes, int | None] = NONE
    ) -> BatchAdmission:
        """Take a batch in, least recently used first: all of it counts as used now, in that order.
        If the batch alone exceeds the capacity its last names (the root side of a path) are taken.

        If keys must leave, those of salts above their quotas leave first, as many as each has
        beyond it. They may be of the batch: new ones are refused, others are evicted. Without
        quotas none of the batch is a victim.

        Args:
            salts: numbers of salts by key, of those that are known.
        """
        keys = list(dict.fromkeys(keys))
        refused: list[bytes] = []
        if self.capacity and len(keys) > self.capacity:
            refused, keys = keys[: -self.capacity], keys[-self.capacity :]
        existing = [key for key in keys if key in self._names]
        for key in keys:
            self._use(key, salts.get(key))
        there, batch = set(existing), set(keys)
        evicted, beyond = [], set[bytes]()
        for key in self._beyond(keys):
            new = key in batch and key not in there
            self._drop(key, departed=not new)
            if key in batch:
                beyond.add(key)
            if not new:
                evicted.append(key)
        while self.capacity and len(self._names) > self.capacity:
            evicted.append(next(iter(self._names)))
            self._drop(evicted[-1])
        kept = [key for key in keys if key not in beyond]
        stays = [key for key in refused if key in self._names]  # others left for a quota
        return BatchAdmission(
            [key for key in kept if key not in there],
            [*stays, *(key for key in kept if key in there)],
            [key for key in (*refused, *keys) if key in beyond or key not in self._names],
            evicted,
        )

    def _beyond(self, batch: Iterable[bytes]) -> list[bytes]:
        """The keys that leave for a batch because of a quota."""
        over = len(self._names) - self.capacity
        if not self.capacity or over <= 0:
            return []
        return self.shares.victims(over, (self._names[key] for key in batch))

    def evict(self, busy: Container[bytes]) -> bytes | None:
        """Remove the least recently used key that is not in `busy`, first of the salts above their
        quotas. None if there is none."""
        key = self.shares.first_beyond(busy)
        if key is None:
            key = next((one for one in self._names if one not in busy), None)
        if key is not None:
            self._drop(key)
        return key

    def remove(self, keys: Iterable[bytes]) -> list[bytes]:
        gone = []
        for key in keys:
            if key in self._names:
                self._drop(key)
                gone.append(key)
        return gone

    def clear(self) -> None:
        self.departed.update(self._names)
        self._names.clear()
        self.shares.clear()
        self._shards = [set() for _ in range(SHARDS)]

    def run(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of keys in the catalog. They count as used now, the first most
        recently."""
        run = next((i for i, key in enumerate(keys) if key not in self._names), len(keys))
        for key in reversed(keys[:run]):
            self._use(key, None)
        return run


# -- shares by salt


COUNTED_SALTS = 4096
"""Salts without a named quota whose victims are counted."""


class StoreShares:
    """Keys by salt, in the order of their last use. A key whose salt is not known counts to
    none."""

    def __init__(self, quotas: StorageQuotas | None = None) -> None:
        self.quotas = StorageQuotas() if quotas is None else quotas
        self.quota_evictions = 0  # objects that left, or were not taken, because of a quota
        # The same by salt, of the first COUNTED_SALTS salts and of those that are named.
        self.evicted: dict[int, int] = {}
        self._orders: dict[int, OrderedDict[bytes, None]] = {}
        self._above: dict[int, None] = {}  # salts above their quota

    def follow(self, quotas: StorageQuotas) -> None:
        self.quotas = quotas
        quotas.changed = self._settle
        for salt in self._orders:
            self._settle(salt)

    def held(self, salt: int) -> int:
        return len(self._orders.get(salt, ()))

    @property
    def counted(self) -> int:
        """Objects whose salt is known."""
        return sum(map(len, self._orders.values()))

    def check(self) -> None:
        ensure(all(self._orders.values()), "a salt without objects")
        above = {salt for salt, order in self._orders.items() if len(order) > self._quota(salt)}
        ensure(above == set(self._above), "salts above their quotas in the store")

    def add(self, key: bytes, salt: int) -> None:
        self._orders.setdefault(salt, OrderedDict())[key] = None
        self._settle(salt)

    def remove(self, key: bytes, salt: int) -> None:
        order = self._orders[salt]
        del order[key]
        if not order:
            del self._orders[salt]
        self._settle(salt)

    def touch(self, key: bytes, salt: int) -> None:
        self._orders[salt].move_to_end(key)

    def first(self, salt: int, most: int) -> list[bytes]:
        """The least recently used keys of a salt, at most `most`."""
        return list(islice(self._orders.get(salt, ()), most))

    def clear(self) -> None:
        self._orders.clear()
        self._above.clear()

    def victims(self, over: int, incoming: Iterable[int | None]) -> list[bytes]:
        """Choose up to `over` keys of salts above their quotas, as many as each has beyond it, the
        least recently used first. No key leaves yet.

        Args:
            incoming: salts whose keys were used now. Theirs leave before those of other salts.
        """
        found: list[bytes] = []
        if not self._above:
            return found
        first = dict.fromkeys(salt for salt in incoming if salt is not None)
        for salt in [*first, *(salt for salt in self._above if salt not in first)]:
            if salt not in self._above:
                continue
            order = self._orders[salt]
            beyond = min(over - len(found), len(order) - int(self._quota(salt)))
            found += islice(order, beyond)
            self._count(salt, beyond)
            if len(found) == over:
                break
        return found

    def first_beyond(self, busy: Container[bytes]) -> bytes | None:
        """The least recently used key of a salt above its quota that is not in `busy`, None if
        there is none."""
        for salt in self._above:
            for key in self._orders[salt]:
                if key not in busy:
                    self._count(salt, 1)
                    return key
        return None

    def _quota(self, salt: int) -> float:
        quota = self.quotas.get(salt)
        return inf if quota is None else quota

    def _settle(self, salt: int) -> None:
        if self.held(salt) > self._quota(salt):
            self._above[salt] = None
        else:
            self._above.pop(salt, None)

    def _count(self, salt: int, objects: int) -> None:
        self.quota_evictions += objects
        if not objects:
            return
        named = self.quotas.is_named(salt)
        if salt in self.evicted or len(self.evicted) < COUNTED_SALTS or named:
            self.evicted[salt] = self.evicted.get(salt, 0) + objects


def keep_quotas(quotas: StorageQuotas, shares: StoreShares | None, backend: str) -> None:
    """Have a store keep the quotas of salts. ConfigError if it cannot, and there is one."""
    if shares is not None:
        shares.follow(quotas)
    elif quotas:
        raise ConfigError(
            f"storage.backend = {backend!r} keeps no quota of a salt: leave out quota.storage, or "
            "set storage.backend = 'file'"
        )
