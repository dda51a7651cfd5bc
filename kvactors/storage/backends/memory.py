"""A store in this process's memory: for tests, simulation and replays. Checksums are verified as
everywhere."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import xxhash

from kvactors.storage.backends.owned import OwnedBackend
from kvactors.storage.messages import Outcome


class MemoryBackend(OwnedBackend):
    """Objects as bytes, each with its XXH3-64. Nothing survives `close`."""

    def __init__(self, fingerprint: bytes, block_bytes: int, capacity: int = 0) -> None:
        super().__init__(fingerprint, block_bytes, capacity)
        self.objects: dict[bytes, tuple[bytes, int]] = {}

    async def open(self) -> None:
        """Nothing to find."""

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """See `Backend.load`."""
        found = self.objects.get(key)
        if found is None:
            return Outcome.MISS
        data, checksum = found
        if len(data) != len(into) or xxhash.xxh3_64_intdigest(data) != checksum:
            return Outcome.CORRUPT
        into[:] = data
        return Outcome.OK

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """See `Backend.save`."""
        copy = bytes(data)
        self.objects[key] = (copy, xxhash.xxh3_64_intdigest(copy))
        return Outcome.OK

    async def erase(self, keys: Sequence[bytes]) -> None:
        """See `Backend.erase`."""
        for key in keys:
            self.objects.pop(key, None)

    def present(self, key: bytes) -> bool:
        """See `OwnedBackend.present`."""
        return key in self.objects

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """One after another: there is nothing to wait for."""
        for item in work:
            await item()

    async def close(self) -> None:
        """Forget everything."""
        self.objects.clear()
        self.catalog.clear()
