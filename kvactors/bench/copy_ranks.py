"""What it costs to hand a batch to four ranks in processes of their own, and to gather their
answers."""

from __future__ import annotations

import tempfile
import time
from contextlib import AsyncExitStack
from functools import partial
from statistics import median

from kvactors.bench.report import Row, time_row
from kvactors.cache import open_cache
from kvactors.config import CacheConfig, Config, DeviceConfig, HostConfig, LayoutConfig
from kvactors.data_plane.ranks.protocol import CopyBlocks
from kvactors.ranks_config import RanksConfig
from kvactors.testing.ranks import RankProcess

RANKS = 4
BAR = 1000.0
"""Microseconds: about what the bytes of one 8 MiB block take over PCIe twice."""


def _copy(ids: tuple[int, ...], op: int) -> CopyBlocks:
    return CopyBlocks(op, True, ids, ids)


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
        async with AsyncExitStack() as stack:
            for rank in range(RANKS):
                process = RankProcess(config, rank)
                await process.start()
                stack.push_async_callback(process.kill)
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
