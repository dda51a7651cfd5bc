"""Quotas of salts, the most resident blocks of each by tier, and counters of salts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

import msgspec

UNNAMED_SALTS = 1000
"""Salts without a named quota that have counters."""


@lru_cache(4096)
def salt_id(salt: str | None) -> int:
    """The number of a salt within the process: 64 bits of its SHA-256, 0 for no salt."""
    if salt is None:
        return 0
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little") or 1


class Quota(NamedTuple):
    """The most resident blocks by tier, None for no limit."""

    device: int | None = None
    host: int | None = None
    storage: int | None = None


class StorageQuotas:
    """The most objects of each salt in the store. Read by the store, which is on the same loop.
    changed: called with the number of a salt whose quota has changed."""

    def __init__(self, default: int | None = None) -> None:
        self.changed: Callable[[int], None] | None = None
        self._default = default
        self._named: dict[int, int | None] = {}

    def __bool__(self) -> bool:
        return self._default is not None or any(one is not None for one in self._named.values())

    def get(self, number: int) -> int | None:
        return self._named.get(number, self._default)

    def is_named(self, number: int) -> bool:
        """Whether a salt has a quota in place of the default."""
        return number in self._named

    def set(self, number: int, quota: Quota | None) -> None:
        """Change the quota of a salt. None: the default applies again."""
        if quota is None:
            self._named.pop(number, None)
        else:
            self._named[number] = quota.storage
        if self.changed is not None:
            self.changed(number)


class SaltCount(msgspec.Struct, eq=False):
    """Counters of one salt, over all incarnations of the actors. device_evicted, host_evicted:
    blocks evicted because of the quota, without those that the present block tree and the present
    host tier count."""

    salt: str
    named: bool
    requests: int = 0
    looked_up: int = 0
    device_hits: int = 0
    host_hits: int = 0
    storage_hits: int = 0
    device_evicted: int = 0
    host_evicted: int = 0


class SaltCounts:
    """Counters by salt: of every salt with a named quota, and of the first UNNAMED_SALTS others.
    rows: by the number of the salt. Empty without salts and named quotas."""

    def __init__(self) -> None:
        self.rows: dict[int, SaltCount] = {}
        self._unnamed = 0

    def name(self, salt: str) -> None:
        row = self.rows.setdefault(salt_id(salt), SaltCount(salt, named=True))
        if not row.named:
            row.named = True
            self._unnamed -= 1

    def forget(self, salt: str) -> None:
        row = self.rows.pop(salt_id(salt), None)
        self._unnamed -= row is not None and not row.named

    def see(self, number: int, salt: str) -> None:
        if number not in self.rows and self._unnamed < UNNAMED_SALTS:
            self.rows[number] = SaltCount(salt, named=False)
            self._unnamed += 1

    def device_ended(self, evicted: Callable[[int], int]) -> None:
        """A block tree is cleared, or lost with its index. evicted: its count of a salt."""
        for number, row in self.rows.items():
            row.device_evicted += evicted(number)

    def host_ended(self, evicted: Mapping[int, int]) -> None:
        """The host tier has been restarted. evicted: its counts by salt."""
        for number, row in self.rows.items():
            row.host_evicted += evicted.get(number, 0)


class Quotas:
    """Quotas by salt. Owned by the system, so that a restarted actor continues with them, and
    changed by PrefixIndex alone. default: of salts that are not named, and of requests without a
    salt."""

    def __init__(self, default: Quota = Quota(), named: dict[str, Quota] | None = None) -> None:  # noqa: B008
        self.default = default
        self._named = {} if named is None else dict(named)
        self.counts = SaltCounts()
        self.storage = StorageQuotas(default.storage)
        for salt, quota in self._named.items():
            self.counts.name(salt)
            self.storage.set(salt_id(salt), quota)

    def __bool__(self) -> bool:
        return self.default != Quota() or bool(self._named)

    def __iter__(self) -> Iterator[tuple[str, Quota]]:
        return iter(self._named.items())

    def __len__(self) -> int:
        return len(self._named)

    def set(self, salt: str, quota: Quota | None) -> None:
        if quota is None:
            self._named.pop(salt, None)
            self.counts.forget(salt)
        else:
            self._named[salt] = quota
            self.counts.name(salt)
        self.storage.set(salt_id(salt), quota)

    def forget(self, salt: str) -> None:
        """The blocks of a salt were cleared. A named quota and its counters stay."""
        if salt not in self._named:
            self.counts.forget(salt)

    def get(self, salt: str) -> Quota | None:
        return self._named.get(salt)
