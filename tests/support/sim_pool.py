"""A simulated pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvactors.errors import StoreUnavailable
from kvactors.storage.backend import Expired
from kvactors.testing.fakes import SimBackend


class SimPool(SimBackend):
    """A pool that other processes use as well: only `ask` finds out which objects it has, which
    takes time, and no object belongs to this process."""

    exclusive = False
    is_complete = False
    keeps_lineages = False
    shares = None

    def keys(self) -> list[bytes]:
        """See `Backend.keys`."""
        return []

    def key_slices(self) -> Iterator[list[bytes]]:
        """See `Backend.key_slices`."""
        return iter(())

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return False

    def probe(self, keys: Sequence[bytes]) -> None:
        """See `Backend.probe`."""

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        await self.delay()
        if self.down:
            raise StoreUnavailable("the pool is down")
        return 0 if expired() else super().probe(keys) or 0
