"""Stores that hang or fail on demand, named by module path in settings."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from kvactors.storage.backend import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome


class FaultyStore(MemoryBackend):
    """A memory store. `mode`: `ok`, `hang` (reads do not return), `hold` (writes do not return),
    `raise`, or `unwritable`. `unreadable`: names of objects that are never read."""

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
        while FaultyStore.mode == "hold":
            await asyncio.sleep(0.005)
        if FaultyStore.mode in ("raise", "unwritable"):
            raise OSError("the disk is gone")
        return await super().save(key, data)


class SharedStore(Backend):
    """A pool that outlives its clients and lists no objects. `mode`: `ok`, or `hang` for look-ups
    that do not return. `asked`: keys of all look-ups."""

    pool: ClassVar[dict[bytes, bytes]] = {}
    mode: ClassVar[str] = "ok"
    asked: ClassVar[list[bytes]] = []

    def __init__(self, _config: Any, fingerprint: bytes, block_bytes: int) -> None:
        super().__init__(fingerprint, block_bytes)

    async def open(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def probe(self, keys: Sequence[bytes]) -> int | None:
        return None

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        while SharedStore.mode == "hang":
            await asyncio.sleep(0.005)
        run = next((i for i, key in enumerate(keys) if key not in self.pool), len(keys))
        SharedStore.asked += keys[: run + 1]
        return run

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        outcomes = bytearray()
        for key, view in zip(keys, views, strict=True):
            data = self.pool.get(key)
            outcomes.append(Outcome.MISS if data is None else Outcome.OK)
            if data is not None:
                view[:] = data
        return ReadReport(bytes(outcomes), [])

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        self.pool.update((key, bytes(view)) for key, view in zip(keys, views, strict=True))
        return WriteReport(bytes(len(keys)), [])

    async def remove(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self.pool.pop(key, None)

    async def clear(self, generation: int = 0) -> None:
        self.pool.clear()
