"""A copy engine on the stand-in driver, with its device and its arena."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from kvactors.data_plane.base import Direction
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import CudaDriver
from kvactors.data_plane.cuda.engine import CudaCopyEngine
from kvactors.device.arena import Arena
from kvactors.layout import GQALayout
from tests.gpu.common import ensure
from tests.support.fake_cuda import FakeCuda

SMALL = GQALayout(3, 2, 16, 16, "float16")
"""Pieces of 1 KiB."""


class Stand:
    """A device, an arena and a copy engine.

    Attributes:
        names: 32 bytes a block, from which its content follows.
    """

    def __init__(
        self,
        driver: CudaDriver,
        layout: Any = SMALL,
        blocks: int = 8,
        slots: int = 8,
        **options: Any,
    ) -> None:
        self.blocks = blocks
        self.device = CudaDevice.allocate(layout, blocks, driver=driver)
        self.arena = Arena(slots, layout.block_bytes)
        self.executor = CudaCopyEngine(self.device, self.arena, **options)
        self.names = np.random.default_rng(3).bytes(32 * blocks)

    def name(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.names[32 * i : 32 * i + 32] for i in ids)

    def close(self) -> None:
        self.device.close()
        self.arena.close()

    def wrong(self, ids: Sequence[int]) -> list[int]:
        return self.device.check(ids, self.name(ids))

    async def there_and_back(self, ids: Sequence[int], slots: Sequence[int]) -> None:
        """Every byte of blocks goes to the host and back, and no other byte is touched. Wrong if
        not."""
        self.device.fill(range(self.blocks), self.names)
        before = bytes(self.arena._map)
        await self.copy(Direction.TO_HOST, ids, slots)
        after = bytes(self.arena._map)
        for slot in set(range(self.arena.num_slots)) - set(slots):
            row = slice(slot * self.arena.stride, (slot + 1) * self.arena.stride)
            ensure(before[row] == after[row], f"slot {slot} of others has other bytes")
        self.device.fill(ids, bytes(32 * len(ids)))
        await self.copy(Direction.TO_DEVICE, ids, slots)
        wrong = self.wrong(range(self.blocks))
        ensure(not wrong, f"blocks {wrong} have other bytes")

    async def copy(self, direction: Direction, ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy. Wrong unless everything arrives."""
        failed = await self.executor.run(direction, ids, slots)
        ensure(not failed, f"copies {direction.value} failed: {self.executor.trouble or failed}")


@asynccontextmanager
async def opened(stand: Stand) -> AsyncIterator[Stand]:
    """A stand while the block runs."""
    try:
        await stand.executor.open()
        yield stand
    finally:
        await stand.executor.close()
        stand.close()


def made(fake: FakeCuda, layout: Any = SMALL, **options: Any) -> Stand:
    """A stand on the stand-in driver."""
    return Stand(CudaDriver(fake.path), layout, **options)


@asynccontextmanager
async def standing(fake: FakeCuda, layout: Any = SMALL, **options: Any) -> AsyncIterator[Stand]:
    async with opened(made(fake, layout, **options)) as stand:
        try:
            yield stand
        finally:
            fake.gate(-1)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)
