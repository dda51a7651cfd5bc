"""Faults of copies, stores, sinks and actors, seen from the public API: no wrong byte, no hang, no
leak."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.data_plane.base import Direction
from kvactors.storage.messages import Outcome
from kvactors.types import Residency, Tier, split_hashes
from tests.support.cache import BLOCK, opened, prompt, serve

HOST = {"slots": 8, "transit_slots": 16}
STORE = {"backend": "memory", "write_policy": "write_back"}


@pytest.mark.parametrize("answer", ["late", "never", "error"])
async def test_a_slow_or_broken_store_costs_a_miss_by_the_deadline(answer):
    async with opened(storage=STORE, host=HOST) as cache:
        await serve(cache, "a", prompt(1, 6))
        for other in (2, 3):
            await serve(cache, "x", prompt(other, 8))
            await cache.wait_idle()
        store = cache.system.backend
        assert len(store.keys()) >= 4
        original, answered = store.load, asyncio.Event()

        async def load(key, into):
            if answer == "error":
                raise RuntimeError("a bug in the back end")
            await answered.wait()
            return await original(key, into) if answer == "late" else Outcome.UNAVAILABLE

        store.load = load
        lease = await cache.acquire("a", prompt(1, 6, tail=1), deadline=1.0)
        await lease.wait_ready()
        assert not answered.is_set(), "the request waited for the store"
        assert lease.hits.storage == 0
        await lease.finish()
        answered.set()
        await cache.wait_idle()
        store.load = original
        assert cache.check() == []


async def test_a_copy_that_hangs_costs_other_blocks_and_its_own_stay_out_of_use(monkeypatch):
    from kvactors.prefix_index import loads

    monkeypatch.setattr(loads, "LATE_LOAD_S", 0.05)
    async with opened(device=16, host={"slots": 16, "transit_slots": 16}) as cache:
        await serve(cache, "a", prompt(1, 4))
        await serve(cache, "b", prompt(2, 16))
        await cache.wait_idle()
        release = asyncio.Event()
        run = cache.system.plane.engine.run

        async def hangs(direction, *pairs):
            if direction is Direction.TO_DEVICE:
                await release.wait()
            return await run(direction, *pairs)

        cache.system.plane.engine.run = hangs
        lease = await cache.acquire("a", prompt(1, 4, tail=1), deadline=1.0)
        table = lease.block_table
        await lease.wait_ready()
        assert lease.hits == (0, 0, 0)
        assert not set(lease.block_table[:4]) & set(table[:4])
        cache.device.fill(lease.block_table[:4], lease.hashes(0, 4))
        await lease.commit(4 * BLOCK)
        release.set()
        cache.system.plane.engine.run = run
        await cache.wait_idle()
        assert cache.device.check(lease.block_table[:4], lease.hashes(0, 4)) == []
        await lease.finish()


# -- blocks move between tiers, and are never nowhere in between


WRITE_BACK = {"backend": "memory", "write_policy": "write_back"}


def slow_writes(cache, seconds: float) -> None:
    """Every write of the store takes a while longer."""
    write = cache.system.store.inner.write

    async def slowly(*arguments, **options):
        await asyncio.sleep(seconds)
        return await write(*arguments, **options)

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
    async with opened(device=8, host=host, storage=WRITE_BACK) as cache:
        slow_writes(cache, 0.002)
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
    async with opened(
        device=8, host={"slots": 0, "transit_slots": 40}, storage=WRITE_BACK
    ) as cache:
        slow_writes(cache, 0.002)
        for i in range(8):
            await serve(cache, f"r{i}", prompt(i, 6))
        await cache.wait_flushed(10)
        sink = cache.sinks["memory"]
        assert len(sink.view()[Tier.STORAGE]) > 20
        assert gaps(sink) == 0
