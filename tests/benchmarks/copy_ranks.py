"""Cost of sending a batch to four rank processes and gathering their answers.

`python -m tests.benchmarks.copy_ranks CONFIG RANK` is one rank process.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from statistics import median

import msgspec

from kvactors.data_plane.base import Direction
from kvactors.data_plane.ranks.protocol import CopyBlocks
from kvactors.data_plane.ranks.worker import serve_rank
from kvactors.device.host import HostDevice
from kvactors.layout import make_layout
from kvactors.opening import open_cache
from kvactors.settings import CacheConfig, Config, DeviceConfig, HostConfig, LayoutConfig
from kvactors.settings.ranks import RanksConfig
from tests.benchmarks.frame import Row, time_row
from tests.support.child import child

RANKS = 4
BAR = 1000.0
"""Microseconds: about what the bytes of one 8 MiB block take over PCIe twice."""


def _copy(ids: tuple[int, ...], op: int) -> CopyBlocks:
    return CopyBlocks(op, Direction.TO_DEVICE, ids, ids)


async def rank_rows(batches: int) -> list[Row]:
    """Batches of 1 and of 64 pairs of the smallest blocks there are, one after another: all but the
    copies themselves."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvactors-") as folder:
        config = Config(
            cache=CacheConfig(block_size=1),
            device=DeviceConfig(num_blocks=64),
            host=HostConfig(slots=64),
            layout=LayoutConfig(
                num_layers=1, num_kv_heads=RANKS, head_dim=8, tensor_parallel=RANKS
            ),
            ranks=RanksConfig(RANKS, f"unix://{folder}/ranks"),
        )
        encoded = msgspec.json.encode(config).decode()
        async with AsyncExitStack() as stack:
            for rank in range(RANKS):
                await stack.enter_async_context(child("-m", __name__, encoded, str(rank)))
            cache = await stack.enter_async_context(open_cache(config))
            group = cache.system.ranks
            assert group is not None
            for pairs in (1, 64):
                ids, times = tuple(range(pairs)), []
                for _ in range(batches):
                    began = time.perf_counter()
                    answers = await group.scatter(partial(_copy, ids), outcomes=pairs)
                    times.append(1e6 * (time.perf_counter() - began))
                    assert None not in answers
                name = f"{RANKS} ranks: scatter and gather, {pairs} pairs a batch, p50"
                rows.append(time_row(name, median(times), BAR, "us", "the bar of 1 ms"))
    return rows


async def serve(config: Config, rank: int) -> None:
    """Serve one rank with a device in host memory until the process is killed."""
    layout = make_layout(config.layout, config.cache.block_size)
    device = HostDevice(layout, config.device.num_blocks)
    count = config.ranks.count
    await serve_rank(config.ranks.endpoint, device, rank=rank, ranks=count, config=config)


if __name__ == "__main__":
    asyncio.run(serve(msgspec.json.decode(sys.argv[1], type=Config), int(sys.argv[2])))
