"""Sleep and wake: memory is released and taken again, blocks move down before, and a call that
fails leaves the cache awake or asleep."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path

import pytest

import kvactors
from kvactors import Hints
from kvactors.device.host import HostDevice
from kvactors.errors import (
    CacheAsleep,
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    LayoutError,
    LeasesOpen,
    SleepUnsupported,
)
from kvactors.layout import GQALayout
from kvactors.prefix_index.messages import Acquire
from kvactors.testing.sim import problems_at_rest
from tests.cache.test_quotas import held, hosted, settle, use
from tests.support.cache import BLOCK, opened, prompt, serve, settings

HOST = {"slots": 16, "transit_slots": 16}
TOKENS = prompt(1, 3, tail=1)


def stored(folder, policy="write_back"):
    return {
        "backend": "file",
        "directory": str(folder),
        "capacity_blocks": 64,
        "write_policy": policy,
    }


@pytest.mark.parametrize("mode", ["exclusive", "inclusive"])
async def test_level_1_moves_the_device_to_the_host(mode):
    async with opened(device=8, host={**HOST, "mode": mode}) as cache:
        await serve(cache, "a", TOKENS)
        memory = weakref.ref(cache.device)
        await cache.sleep()
        gc.collect()
        assert memory() is None, "the device's memory is released"
        assert cache.health().status == "degraded"
        assert "asleep (level 1)" in cache.health().reasons[0].why
        assert cache.statistics().prefix.nodes_referenced == 0
        assert cache.statistics().prefix.blocks_free == 8
        await cache.wake()
        assert cache.health() == ("ok", ())
        assert (await serve(cache, "a", TOKENS)).hits.host == 3


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
async def test_level_2_moves_the_host_to_storage(policy, tmp_path):
    async with opened(device=8, host=HOST, storage=stored(tmp_path, policy)) as cache:
        await serve(cache, "a", TOKENS)
        await cache.sleep(2)
        assert cache.statistics().host.resident == 0
        assert cache.system.arena.view(0)[:4] == bytes(4)
        await cache.wake()
        assert (await serve(cache, "a", TOKENS)).hits.storage == 3


async def test_every_call_that_needs_the_tiers_is_refused():
    async with opened(device=8, host=HOST) as cache:
        await serve(cache, "a", TOKENS)
        await cache.sleep()
        calls = (
            lambda: cache.acquire("b", TOKENS),
            lambda: cache.acquire("b", TOKENS, wait_for_room=True),
            lambda: cache.prefetch(TOKENS),
            lambda: cache.clear(),
            lambda: cache.sleep(),
        )
        for call in calls:
            with pytest.raises(CacheAsleep):
                await call()
        for look in (lambda: cache.lookup(TOKENS), cache.free_blocks):
            with pytest.raises(CacheAsleep):
                look()
        await cache.set_namespace("other weights")
        await cache.set_namespace("default")
        await cache.pause()
        await cache.resume()
        assert cache.check() == []
        await cache.wake()
        await cache.wake()
        await serve(cache, "b", TOKENS)


async def test_an_open_lease_refuses_the_sleep_and_nothing_changes():
    async with opened(device=8, host=HOST) as cache:
        await serve(cache, "a", TOKENS)
        lease = await cache.acquire("b", prompt(2, 2))
        with pytest.raises(LeasesOpen, match="1 lease open"):
            await cache.sleep()
        assert cache.statistics().prefix.evicted == 0
        await lease.extend([1])
        await lease.finish()
        await cache.sleep()
        await cache.wake()


async def test_a_closed_cache_may_be_asleep(tmp_path):
    for level in (1, 2):
        async with kvactors.open(settings(device=8, host=HOST, storage=stored(tmp_path))) as cache:
            await serve(cache, "a", TOKENS)
            await cache.sleep(level)


async def test_a_sleep_that_is_late_leaves_the_cache_awake(monkeypatch):
    async with opened(device=8, host=HOST) as cache:
        await serve(cache, "a", TOKENS)
        copy = cache.device.copy_to_host
        monkeypatch.setattr(
            cache.device,
            "copy_to_host",
            lambda *pairs: (__import__("time").sleep(0.2), copy(*pairs)),
        )
        with pytest.raises(DeadlineExceeded):
            await cache.sleep(deadline=0.05)
        await serve(cache, "b", prompt(2, 2))


async def test_a_wake_without_memory_leaves_the_cache_asleep(monkeypatch, tmp_path):
    async with opened(device=8, host=HOST, storage=stored(tmp_path)) as cache:
        await serve(cache, "a", TOKENS)
        await cache.sleep(2)
        with monkeypatch.context() as patched:

            def refuse(*_):
                raise DeviceError("out of memory")

            patched.setattr("kvactors.cache.make_device", refuse)
            with pytest.raises(DeviceError, match="out of memory"):
                await cache.wake()
        with monkeypatch.context() as patched:

            def fail():
                raise MemoryError

            patched.setattr(cache.system.arena.fresh, "touch", fail)
            with pytest.raises(MemoryError):
                await cache.wake()
        with pytest.raises(CacheAsleep):
            await cache.acquire("b", TOKENS)
        await cache.wake()
        assert (await serve(cache, "a", TOKENS)).hits.storage == 3


async def test_an_engine_frees_its_tensors_and_gives_others():
    layout = GQALayout(2, 1, 8, BLOCK, "uint8")
    device = HostDevice(layout, 8)
    config = settings(device=8, host=HOST)
    async with kvactors.open(config, device=device) as cache:
        await serve(cache, "a", TOKENS)
        with pytest.raises(TypeError):
            await cache.wake(5)
        await cache.sleep()
        memory = weakref.ref(device)
        del device
        gc.collect()
        assert memory() is None, "no reference to the engine's tensors is left"
        with pytest.raises(ConfigError, match="give wake"):
            await cache.wake()
        with pytest.raises(ConfigError, match="8 of kind"):
            await cache.wake(HostDevice(layout, 9))
        with pytest.raises(LayoutError):
            await cache.wake(HostDevice(GQALayout(3, 1, 8, BLOCK, "uint8"), 8))
        await cache.wake(HostDevice(layout, 8))
        assert (await serve(cache, "a", TOKENS)).hits.host == 3
        assert await problems_at_rest(cache, 10) == []
    async with opened(device=8) as cache:
        await cache.sleep()
        with pytest.raises(ConfigError, match="without one"):
            await cache.wake(HostDevice(layout, 8))


async def test_an_index_that_restarts_during_the_sleep_admits_nothing():
    async with opened(device=8, host=HOST) as cache:
        await serve(cache, "a", TOKENS)
        await cache.sleep()
        cache.system.index_actor.handlers[Acquire] = lambda *_: 1 / 0
        with pytest.raises((kvactors.ActorFailed, CacheAsleep)):
            await cache.acquire("b", TOKENS)
        await cache.wait_idle()
        with pytest.raises(CacheAsleep):
            await cache.acquire("b", TOKENS)
        await cache.wake()
        await serve(cache, "b", TOKENS)


async def test_the_host_arena_gives_its_memory_back(tmp_path):
    size = 64 << 20
    config = settings(
        device=4, host={"slots": size // 4096, "transit_slots": 16}, storage=stored(tmp_path)
    )
    async with kvactors.open(config) as cache:
        before = resident_bytes()
        await cache.sleep(2)
        assert resident_bytes() < before - size // 2
        await cache.wake()
        assert resident_bytes() > before - size // 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


async def test_unsupported_parts_refuse(monkeypatch):
    async with opened(device=8) as cache:
        monkeypatch.setattr(cache.system, "device_store", object())
        with pytest.raises(SleepUnsupported, match="attention_store"):
            await cache.sleep()
        monkeypatch.undo()
        with pytest.raises(ValueError, match="level"):
            await cache.sleep(3)
        await serve(cache, "a", TOKENS)


# -- pins, quotas and cancellation


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleep_ends_pins_and_keeps_quotas(level, tmp_path):
    options = {"quota": {"device": 4}, "hints": {"pin_share": 1.0}}
    async with opened(device=8, host=HOST, storage=stored(tmp_path), **options) as cache:
        await cache.set_quota("noisy", device=2)
        await use(cache, 1, salt="quiet", hints=Hints(pin=True))
        assert cache.statistics().prefix.pinned == 2
        await cache.sleep(level)
        statistics = cache.statistics()
        assert statistics.prefix.pinned == statistics.host.pinned_blocks == 0
        await cache.wake()
        assert held(cache, 1, salt="quiet") == 0
        assert hosted(cache, 1, salt="quiet") == (2 if level == 1 else 0)
        await use(cache, 1, salt="quiet")
        for number in range(2, 6):
            await use(cache, number, salt="noisy")
        assert held(cache, 1, salt="quiet") == 2, "the quota of before the sleep is kept"
        assert cache.statistics().prefix.pinned == 0
        await settle(cache)


async def cancelled(call, steps):
    """Cancel a call after some steps of the loop."""
    task = asyncio.ensure_future(call)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize("steps", [*range(10), *range(12, 60, 6)])
@pytest.mark.parametrize("level", [1, 2])
async def test_a_cancelled_sleep_or_wake_leaves_the_cache_asleep_or_awake(steps, level, tmp_path):
    async with opened(device=8, host=HOST, storage=stored(tmp_path), inline=True) as cache:
        await serve(cache, "a", TOKENS)
        await cancelled(cache.sleep(level), steps)
        if not cache.system.asleep:
            assert (await serve(cache, "a", TOKENS)).cached_tokens == 3 * BLOCK
            await cache.sleep(level)
        await cancelled(cache.wake(), steps)
        while True:  # a wake that has taken memory goes on to its end
            try:
                await cache.wake()
                break
            except CacheAsleep:
                await asyncio.sleep(0)
        assert cache.health() == ("ok", ())
        assert (await serve(cache, "a", TOKENS)).cached_tokens == 3 * BLOCK
