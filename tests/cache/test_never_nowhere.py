"""Blocks move between tiers, and indexes are never sent that a block is nowhere in between."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.types import Residency, Tier, split_hashes
from tests.support.cache import opened, prompt, serve

STORE = {"backend": "memory", "write_policy": "write_back"}


def held_back(cache, seconds: float) -> None:
    """Every write of the store takes a while longer."""
    write = cache.system.store.inner.write

    async def slowly(*arguments):
        await asyncio.sleep(seconds)
        return await write(*arguments)

    cache.system.store.inner.write = slowly


def gaps(sink) -> int:
    """How often a block that had been announced was nowhere."""
    held: dict[bytes, int] = {}
    found = 0
    for task in sink.tasks:
        for key in split_hashes(task.hashes):
            before = held.get(key, 0)
            held[key] = (
                before | task.tier if task.residency is Residency.RESIDENT else before & ~task.tier
            )
            found += bool(before) and not held[key]
    return found


@pytest.mark.parametrize("mode", ["exclusive", "inclusive"])
async def test_from_the_host_to_storage(mode):
    host = {"slots": 8, "transit_slots": 40, "mode": mode}
    async with opened(device=8, host=host, storage=STORE) as cache:
        held_back(cache, 0.002)
        for i in range(8):
            await serve(cache, f"r{i}", prompt(i, 6))
            await serve(cache, f"again {i}", prompt(i // 2, 6))
        await cache.wait_flushed(10)
        sink = cache.sinks["memory"]
        assert len(sink.view()[Tier.STORAGE]) > 20
        assert gaps(sink) == 0


@pytest.mark.parametrize("bound", [1, 1024])
@pytest.mark.parametrize("layerwise", [False, True])
async def test_from_an_exclusive_host_tier_back_to_the_device(layerwise, bound):
    """The device is announced before the host copy is dropped, however full the channels are."""
    host = {"slots": 60, "transit_slots": 40, "mode": "exclusive"}
    tables = {"actors": {"channel_bound": bound}}
    async with opened(device=8, host=host, **tables) as cache:
        cache.system.evictor_actor.layerwise = layerwise
        for i in range(12):
            await serve(cache, f"r{i}", prompt(i % 3, 6))
            await serve(cache, f"again {i}", prompt((i + 1) % 4, 5))
        await cache.wait_flushed(10)
        assert cache.statistics().prefix.host_hits > 30
        assert gaps(cache.sinks["memory"]) == 0


async def test_through_the_host_to_storage():
    async with opened(device=8, host={"slots": 0, "transit_slots": 40}, storage=STORE) as cache:
        held_back(cache, 0.002)
        for i in range(8):
            await serve(cache, f"r{i}", prompt(i, 6))
        await cache.wait_flushed(10)
        sink = cache.sinks["memory"]
        assert len(sink.view()[Tier.STORAGE]) > 20
        assert gaps(sink) == 0
