"""Questions to a pool's master about objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvactors.errors import StoreUnavailable
from kvactors.storage.backends.base import Expired
from kvactors.storage.backends.mooncake_client import MooncakeClient
from kvactors.storage.counters import StoreCounters
from kvactors.storage.messages import Outcome

BATCH = 32
"""Objects in one question to the master, at most."""


class PoolPresence:
    """Asks which objects the pool has. The master gives each object that it is asked about a lease.

    Args:
        client: of the pool.
        name: of a key's object.
        counters: of the back end.
    """

    def __init__(
        self, client: MooncakeClient, name: Callable[[bytes], str], counters: StoreCounters
    ) -> None:
        self._client = client
        self._name = name
        self._counters = counters

    async def run(self, keys: Sequence[bytes], expired: Expired) -> int:
        """Length of the leading run of keys that the pool has. No key behind it is asked about.

        Raises:
            StoreUnavailable: the master does not answer.
        """
        run = 0
        for start in range(0, len(keys), BATCH):
            if expired():
                return run
            codes = await self._codes(keys[start : start + BATCH])
            good = next((i for i, code in enumerate(codes) if code != 1), len(codes))
            run += good
            if good < len(codes):
                return run
        return run

    async def each(self, keys: Sequence[bytes], expired: Expired) -> list[bool]:
        """Whether the pool has each key. The leases of objects behind a missing one cost it little:
        they end after seconds.

        Raises:
            StoreUnavailable: the master does not answer.
        """
        found: list[bool] = []
        for start in range(0, len(keys), BATCH):
            if expired():
                break
            found += [code == 1 for code in await self._codes(keys[start : start + BATCH])]
        return found + [False] * (len(keys) - len(found))

    async def _codes(self, keys: Sequence[bytes]) -> list[int]:
        codes = await self._client.exist([self._name(key) for key in keys])
        self._counters.outcomes[Outcome.UNAVAILABLE] += sum(code < 0 for code in codes)
        if max(codes) < 0:
            raise StoreUnavailable(f"the pool's master does not answer (code {codes[0]})")
        return codes
