"""Quotas of salts: the most resident blocks of each in the device and host tiers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple


@lru_cache(4096)
def salt_id(salt: str | None) -> int:
    """The number that stands for a salt within the process: 64 bits of its SHA-256, 0 for no
    salt."""
    if salt is None:
        return 0
    return int.from_bytes(hashlib.sha256(salt.encode()).digest()[:8], "little") or 1


class Quota(NamedTuple):
    """The most resident blocks by tier, None for no limit."""

    device: int | None = None
    host: int | None = None


class Quotas:
    """Quotas by salt. Owned by the system, so that a restarted actor continues with them, and
    changed by PrefixIndex alone.

    Attributes:
        default: of salts that are not named, and of requests without a salt.
    """

    def __init__(self, default: Quota = Quota(), named: dict[str, Quota] | None = None) -> None:  # noqa: B008
        self.default = default
        self._named = {} if named is None else dict(named)

    def __bool__(self) -> bool:
        return self.default != Quota() or bool(self._named)

    def __iter__(self) -> Iterator[tuple[str, Quota]]:
        return iter(self._named.items())

    def __len__(self) -> int:
        return len(self._named)

    def set(self, salt: str, quota: Quota | None) -> None:
        """Change the quota of a salt. None: the default applies again."""
        if quota is None:
            self._named.pop(salt, None)
        else:
            self._named[salt] = quota
