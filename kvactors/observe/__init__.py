"""Statistics, metrics and logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvactors.system import System


class OpenCache(Protocol):
    """A `KVCache` as observers see it."""

    @property
    def system(self) -> System:
        """The parts of the cache."""
