"""A store whose reads take some time, and of which some fail."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome


class SlowStore(MemoryBackend):
    """Objects in memory."""

    def __init__(self, _config: Any, fingerprint: bytes, block_bytes: int) -> None:
        super().__init__(fingerprint, block_bytes)
        self._reads = itertools.count()

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        number = next(self._reads)
        await asyncio.sleep(number % 4 * 0.005)
        if number % 13 == 12:
            return Outcome.CORRUPT
        return await super().load(key, into)
