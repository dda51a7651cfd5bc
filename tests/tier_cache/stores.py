"""Stores that hang or fail on demand, named by module path in settings."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from kvactors.storage.backends import MemoryBackend
from kvactors.storage.messages import Outcome


class FaultyStore(MemoryBackend):
    """A memory store. `mode` decides how it reads: `ok`, `hang` or `raise`. `unreadable`: names of
    objects that are never read."""

    mode: ClassVar[str] = "ok"
    unreadable: ClassVar[set[bytes]] = set()

    def __init__(self, _config: Any, fingerprint: bytes, block_bytes: int) -> None:
        super().__init__(fingerprint, block_bytes)

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        while FaultyStore.mode == "hang":
            await asyncio.sleep(0.005)
        if FaultyStore.mode == "raise":
            raise OSError("the disk is gone")
        if key in FaultyStore.unreadable:
            return Outcome.UNAVAILABLE
        return await super().load(key, into)

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        if FaultyStore.mode == "raise":
            raise OSError("the disk is gone")
        return await super().save(key, data)
