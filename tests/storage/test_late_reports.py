"""Several actors report the blocks in storage. A report that waits for a place in the notifier's
channel may be overtaken by a newer one of another actor."""

from __future__ import annotations

import asyncio
import random

import pytest

import kvactors

BLOCK = 4


def config(policy: str) -> kvactors.Config:
    """A store of one object behind three writers and two readers, and channels of one message."""
    return kvactors.Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK},
            "device": {"num_blocks": 22},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
            "host": {"transit_slots": 44},
            "storage": {
                "backend": "memory",
                "capacity_blocks": 1,
                "write_policy": policy,
                "writers": 3,
                "readers": 2,
            },
            "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
            "actors": {"channel_bound": 1},
        }
    )


async def serve(cache: kvactors.KVCache, seed: int) -> None:
    rng = random.Random(seed)
    for number in range(40):
        first = rng.randrange(64)
        tokens = [first] * BLOCK + [rng.randrange(8) for _ in range(BLOCK)]
        try:
            async with await cache.acquire(f"{seed}.{number}", tokens) as lease:
                await lease.wait_ready()
                full = lease.num_tokens // BLOCK
                cache.device.fill(lease.block_table[:full], lease.hashes(0, full))
                await lease.commit(len(tokens))
        except kvactors.NoRoom:
            await asyncio.sleep(0)


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
async def test_sinks_are_right_although_reports_of_several_writers_overtake_each_other(policy):
    async with kvactors.open(config(policy)) as cache:
        await asyncio.gather(*(serve(cache, seed) for seed in range(8)))
        await cache.wait_flushed(60)
        assert cache.statistics().store.evicted > 50
        assert cache.check() == []
        assert cache.count_divergent_blocks() == 0
