"""A memory store whose faults a test switches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from kvactors.storage.backend import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome

MODES = ("ok", "slow", "refuses", "damages", "unreachable")


class Faults(Backend):
    """`mode` decides what reads and writes do: see MODES."""

    mode: ClassVar[str] = "ok"
    damages: ClassVar[int] = 0

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        await self._fault()
        if Faults.mode != "damages":
            return await super().read(keys, views, expired)  # type: ignore[safe-super]
        Faults.damages += 1
        return await self.read_damaged(keys, views, expired)

    async def read_damaged(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        raise NotImplementedError

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired, *rest: Any
    ) -> WriteReport:
        await self._fault()
        if Faults.mode == "refuses":
            return WriteReport(bytes([Outcome.NO_SPACE]) * len(keys), [])
        return await super().write(keys, views, expired, *rest)  # type: ignore[safe-super]

    async def _fault(self) -> None:
        if Faults.mode == "slow":
            await asyncio.sleep(0.003)
        if Faults.mode == "unreachable":
            raise OSError("the store is gone")


class FaultyMemory(Faults, MemoryBackend):
    """Finds damage after the bytes are in the view, as a store with checksums."""

    def __init__(self, config: Any, digest: bytes, block_bytes: int) -> None:
        MemoryBackend.__init__(self, digest, block_bytes, config.capacity_blocks or 0)

    async def read_damaged(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        for view in views:
            view[:] = b"\xee" * view.nbytes
        await self.remove(keys)
        return ReadReport(bytes([Outcome.CORRUPT]) * len(keys), [])
