"""The tables of RETAIN leave no memory behind. From the allocator they would: it keeps what it has freed between
other pieces."""

from __future__ import annotations

import gc

import kvactors
from tests.soak.memory import resident_kib

CONFIG = kvactors.Config.from_mapping(
    {
        "cache": {"block_size": 4},
        "device": {"num_blocks": 40, "policy": "retain"},
        "host": {"slots": 64},
        "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
    }
)
MOST = 12 << 10
"""KiB that 12 caches may leave behind. With tables from the allocator it was about 50 MiB."""


async def served(number: int) -> None:
    """Open a cache, and evict blocks that both tiers remember."""
    async with kvactors.open(CONFIG) as cache:
        for request in range(60):
            prompt = [number * 61 + request] * 40 + [request] * 30
            async with await cache.acquire("r", prompt) as lease:
                await lease.wait_ready()
                await lease.commit(64)


async def test_closed_caches_leave_no_tables_resident() -> None:
    for number in range(4):
        await served(number)
    gc.collect()
    before = resident_kib()
    for number in range(12):
        await served(number)
    gc.collect()
    assert resident_kib() - before < MOST
