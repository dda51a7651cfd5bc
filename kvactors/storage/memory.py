"""A store in this process's memory: for tests, simulation and replays. Checksums are verified as
in the other stores."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from kvactors.storage.local_store import LocalStore
from kvactors.storage.messages import Outcome


class MemoryBackend(LocalStore):
    """Objects as bytes, each with its XXH3-64. None outlives `close`."""

    def __init__(self, digest: bytes, block_bytes: int, capacity: int = 0) -> None:
        super().__init__(digest, block_bytes, capacity)
        self.objects: dict[bytes, tuple[bytes, int]] = {}

    async def open(self) -> None:
        """A new store is empty."""

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        found = self.objects.get(key)
        if found is None:
            return Outcome.MISS
        data, checksum = found
        if len(data) != len(into) or xxhash.xxh3_64_intdigest(data) != checksum:
            return Outcome.CORRUPT
        into[:] = data
        return Outcome.OK

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        copy = bytes(data)
        self.objects[key] = (copy, xxhash.xxh3_64_intdigest(copy))
        return Outcome.OK

    async def erase(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.objects.pop(key, None)

    def present(self, key: bytes) -> bool:
        return key in self.objects

    async def close(self) -> None:
        self.objects.clear()
        self.catalog.clear()
