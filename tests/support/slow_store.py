"""A store with a latency and a bandwidth, in virtual time or for a replay
(`storage.backend = "tests.support.slow_store:SlowStore"`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kvactors.storage.backend import Expired, ReadReport
from kvactors.storage.factory import capacity_of
from kvactors.storage.memory import MemoryBackend


class SlowStore(MemoryBackend):
    """Blocks in memory, behind a link that carries one read after another.

    Attributes:
        latency_s: seconds of a read beside its blocks.
        block_s: seconds that the link needs for a block.
        blocks_read: blocks of reads that have begun.
    """

    latency_s = 0.02
    block_s = 0.05

    def __init__(self, config: Any, digest: bytes, block_bytes: int) -> None:
        super().__init__(digest, block_bytes, capacity_of(config, block_bytes))
        self._free_at = 0.0
        self.blocks_read = 0

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`."""
        now = asyncio.get_running_loop().time()
        if not expired():
            self.blocks_read += len(keys)
            self._free_at = max(now, self._free_at) + self.block_s * len(keys)
            await asyncio.sleep(self._free_at + self.latency_s - now)
            return await super().read(keys, views, lambda: False)
        return await super().read(keys, views, expired)
