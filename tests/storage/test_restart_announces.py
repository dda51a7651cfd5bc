"""After a restart the file store's blocks are announced: with the paths that requests would find."""

from __future__ import annotations

import pytest

import kvactors
from kvactors.units import Tier

BLOCK = 4


def config(tmp_path, **tables) -> kvactors.Config:
    return kvactors.Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK},
            "device": {"num_blocks": 64},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
            "host": {"slots": 16, "transit_slots": 64},
            "storage": {"backend": "file", "directory": str(tmp_path), "capacity_blocks": 500, "write_policy": "write_through"},
            "flush": {"sinks": [{"kind": "memory", "name": "index", "tiers": ["device", "host", "storage"]}]},
            **tables,
        }
    )


async def serve(cache, name: str, tokens: list[int], **scope):
    lease = await cache.acquire(name, tokens, **scope)
    await lease.ready()
    await lease.commit(len(tokens))
    await lease.finish()
    return lease.hits


def stored(cache) -> set[bytes]:
    return set(cache.sinks["index"].view().get(Tier.STORAGE, ()))


def prompt(seed: int, blocks: int = 5) -> list[int]:
    return [7] * (2 * BLOCK) + [seed] * (BLOCK * (blocks - 2)) + [1]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
async def test_what_was_stored_is_announced_after_a_restart(tmp_path, policy):
    settings = config(tmp_path)
    async with kvactors.open(settings) as cache:
        for seed in range(10, 20):
            await serve(cache, str(seed), prompt(seed))
        await cache.flush_settled()
        before = stored(cache)
        assert len(before) == 2 + 10 * 3
    async with kvactors.open(settings) as cache:
        await cache.flush_settled()
        assert stored(cache) == before
        assert cache.divergence() == 0
        assert cache.check() == []
        hits = await serve(cache, "again", prompt(10))
        print(hits)
