"""Copies between a GPU and the pinned arena, against one large pinned copy. Without a GPU
there is nothing to measure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import product
from statistics import median

from kvactors.data_plane.base import Direction
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import CudaDriver, load_driver
from kvactors.data_plane.cuda.engine import CudaCopyEngine
from kvactors.device.arena import Arena
from kvactors.errors import DeviceError
from kvactors.layout import GQALayout, Layout
from tests.benchmarks.frame import Row, rate_row

KIB = 1024


def layouts(*, quick: bool) -> dict[str, Layout]:
    """The GQA layout of an 8B-class model (pieces of 128 KiB), and pieces of 4 KiB to 2 MiB, 32
    layers each."""
    found: dict[str, Layout] = {"GQA 8B, blocks of 64": GQALayout(32, 8, 128, 64, "bfloat16")}
    sizes = (4, 64) if quick else (4, 16, 32, 64, 256, 2048)
    found |= {
        f"pieces of {size} KiB": GQALayout(32, 1, 128, size * KIB // 128, "uint8") for size in sizes
    }
    return found


PATHS = {"kernel": 1 << 40, "copy engines": 0}
"""By name: the setting `host.dma_min_bytes` that sends every piece that way."""
WAYS = (Direction.TO_HOST, Direction.TO_DEVICE)


async def gpu_rows(
    *, quick: bool, driver: CudaDriver | None = None, total: int | None = None
) -> list[Row]:
    """Measure both directions with blocks in another order than their slots and in the same order,
    and both directions at once. Returns no rows without a driver or a GPU.

    Args:
        quick: small sizes, for tests.
        driver: the system's, or a stand-in.
        total: bytes of a batch.
    """
    try:
        driver = driver or load_driver()
        if not driver.read_int("cuDeviceGetCount"):
            return []
    except DeviceError:
        return []
    rows: list[Row] = []
    total = total or (64 << 20 if quick else 1 << 30)
    rounds = 3 if quick else 9
    for (name, layout), (way, batch_from) in product(layouts(quick=quick).items(), PATHS.items()):
        blocks = max(2, total // layout.block_bytes)
        name = f"{name}, {way}"
        async with opened(layout, blocks, driver, batch_from) as executor:
            ids, slots = list(range(blocks - 1, -1, -1)), list(range(blocks))
            for direction in WAYS:
                limit = await large(total, direction, rounds, driver)
                for order, numbers in (("", ids), (", blocks in the order of slots", slots)):
                    ours = await rate(executor, (direction,), ((numbers, slots),), rounds)
                    rows.append(
                        rate_row(
                            f"GPU, {name}: {direction.value}{order}",
                            ours,
                            limit,
                            "GB/s",
                            "one large pinned copy, same run",
                        )
                    )
            half = blocks // 2
            parts = ((ids[:half], slots[:half]), (ids[-half:], slots[-half:]))
            both = await rate(executor, WAYS, parts, rounds)
            rows.append(
                rate_row(
                    f"GPU, {name}: both ways at once",
                    both,
                    limit,
                    "GB/s",
                    "one large pinned copy one way, same run",
                )
            )
    return rows


@asynccontextmanager
async def opened(
    layout: Layout, blocks: int, driver: CudaDriver, batch_from: int | None = None
) -> AsyncIterator[CudaCopyEngine]:
    """A device, a pinned arena and an engine that copies between them."""
    device = CudaDevice.allocate(layout, blocks, driver=driver)
    arena = Arena(blocks, layout.block_bytes)
    arena.fresh.touch()
    executor = CudaCopyEngine(device, arena, batch_from=batch_from)
    try:
        await executor.open()
        yield executor
    finally:
        await executor.close()
        device.close()
        arena.close()


async def large(nbytes: int, direction: Direction, rounds: int, driver: CudaDriver) -> float:
    """GB/s of one copy of so many bytes: one block of one piece."""
    layout = GQALayout(1, 1, 128, nbytes // 256, "uint8")
    async with opened(layout, 1, driver) as executor:
        return await rate(executor, (direction,), (([0], [0]),), rounds)


async def rate(
    executor: CudaCopyEngine,
    ways: Sequence[Direction],
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    rounds: int,
) -> float:
    """GB/s over all ways together, each with its blocks and slots."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        failed = await asyncio.gather(
            *(executor.run(way, *pair) for way, pair in zip(ways, pairs, strict=True))
        )
        times.append(time.perf_counter() - began)
        if any(failed):
            raise RuntimeError(f"copies failed: {executor.trouble}")
    moved = sum(len(ids) for ids, _ in pairs) * executor.device.layout.block_bytes
    return moved / median(times) / 1e9
