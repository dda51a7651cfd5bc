"""Objects of a store by the salt that they were written for, and which of them leave because of a
quota. Pure state, changed on the event loop only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable
from itertools import islice
from math import inf

from kvactors.errors import ConfigError, ensure
from kvactors.quotas import StorageQuotas

COUNTED_SALTS = 4096
"""Salts without a named quota whose victims are counted."""


class StoreShares:
    """Keys by salt, in the order of their last use. A key whose salt is not known counts to none.

    Attributes:
        quotas: of the salts.
        quota_evictions: objects that left, or were not taken, because of a quota.
        evicted: the same by salt, of the first COUNTED_SALTS salts and of those that are named.
    """

    def __init__(self, quotas: StorageQuotas | None = None) -> None:
        self.quotas = StorageQuotas() if quotas is None else quotas
        self.quota_evictions = 0
        self.evicted: dict[int, int] = {}
        self._orders: dict[int, OrderedDict[bytes, None]] = {}
        self._above: dict[int, None] = {}  # salts above their quota

    def follow(self, quotas: StorageQuotas) -> None:
        """Keep these quotas from now on, and their changes."""
        self.quotas = quotas
        quotas.changed = self._settle
        for salt in self._orders:
            self._settle(salt)

    def held(self, salt: int) -> int:
        """Objects of a salt."""
        return len(self._orders.get(salt, ()))

    @property
    def counted(self) -> int:
        """Objects whose salt is known."""
        return sum(map(len, self._orders.values()))

    def check(self) -> None:
        """AssertionError if the salts above their quotas are not those of the counts."""
        ensure(all(self._orders.values()), "a salt without objects")
        above = {salt for salt, order in self._orders.items() if len(order) > self._quota(salt)}
        ensure(above == set(self._above), "salts above their quotas in the store")

    def add(self, key: bytes, salt: int) -> None:
        """A key has entered, as the most recently used."""
        self._orders.setdefault(salt, OrderedDict())[key] = None
        self._settle(salt)

    def remove(self, key: bytes, salt: int) -> None:
        """A key has left."""
        order = self._orders[salt]
        del order[key]
        if not order:
            del self._orders[salt]
        self._settle(salt)

    def touch(self, key: bytes, salt: int) -> None:
        """A key was used."""
        self._orders[salt].move_to_end(key)

    def first(self, salt: int, most: int) -> list[bytes]:
        """The least recently used keys of a salt, at most `most`."""
        return list(islice(self._orders.get(salt, ()), most))

    def clear(self) -> None:
        """Every key has left."""
        self._orders.clear()
        self._above.clear()

    def victims(self, over: int, incoming: Iterable[int | None]) -> list[bytes]:
        """Choose up to `over` keys of salts above their quotas, as many as each has beyond it, the
        least recently used first. No key leaves yet.

        Args:
            over: keys that are to leave.
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
    """Have a store keep the quotas of salts. ConfigError if it cannot, and there is one.

    Args:
        quotas: of salts.
        shares: the store's objects by salt, None if it cannot keep quotas.
        backend: `storage.backend`.
    """
    if shares is not None:
        shares.follow(quotas)
    elif quotas:
        raise ConfigError(
            f"storage.backend = {backend!r} keeps no quota of a salt: leave out quota.storage, or "
            "set storage.backend = 'file'"
        )
