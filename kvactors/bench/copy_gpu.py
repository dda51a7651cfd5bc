"""Copies between a GPU and the pinned arena, against one large pinned copy. Without a GPU
there is nothing to measure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from statistics import median

from kvactors.bench.report import Row, rate_row
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import load_driver
from kvactors.data_plane.cuda.engine import CudaCopyEngine
from kvactors.device.arena import Arena
from kvactors.errors import DeviceError
from kvactors.gpu_swapper.messages import Direction
from kvactors.layout import GQALayout, Layout

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


async def gpu_rows(*, quick: bool) -> list[Row]:
    """Measure both directions, and both at once. Returns no rows without a driver or a GPU."""
    try:
        load_driver()
    except DeviceError:
        return []
    rows: list[Row] = []
    total, rounds = (64 << 20, 3) if quick else (1 << 30, 9)
    for name, layout in layouts(quick=quick).items():
        blocks = max(2, total // layout.block_bytes)
        async with opened(layout, blocks) as executor:
            ids, slots = list(range(blocks - 1, -1, -1)), list(range(blocks))
            for direction in (Direction.TO_HOST, Direction.TO_DEVICE):
                limit = await large(total, direction, rounds)
                ours = await rate(executor, (direction,), ids, slots, rounds)
                rows.append(
                    rate_row(
                        f"GPU, {name}: {direction.value}",
                        ours,
                        limit,
                        "GB/s",
                        "one large pinned copy, same run",
                    )
                )
            half = blocks // 2
            both = await rate(
                executor, tuple(Direction), ids[:half], slots[half : 2 * half], rounds
            )
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
async def opened(layout: Layout, blocks: int) -> AsyncIterator[CudaCopyEngine]:
    """A device, a pinned arena and who copies between them."""
    device, arena = CudaDevice.allocate(layout, blocks), Arena(blocks, layout.block_bytes)
    arena.touch()
    executor = CudaCopyEngine(device, arena)
    try:
        await executor.open()
        yield executor
    finally:
        await executor.close()
        device.close()
        arena.close()


async def large(nbytes: int, direction: Direction, rounds: int) -> float:
    """GB/s of one copy of so many bytes: one block of one piece."""
    layout = GQALayout(1, 1, 128, nbytes // 256, "uint8")
    async with opened(layout, 1) as executor:
        return await rate(executor, (direction,), [0], [0], rounds)


async def rate(
    executor: CudaCopyEngine,
    ways: Sequence[Direction],
    ids: Sequence[int],
    slots: Sequence[int],
    rounds: int,
) -> float:
    """GB/s over all ways together."""
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        failed = await asyncio.gather(*(executor.run(way, ids, slots) for way in ways))
        times.append(time.perf_counter() - began)
        assert not any(failed)
    return len(ways) * len(ids) * executor.device.layout.block_bytes / median(times) / 1e9
