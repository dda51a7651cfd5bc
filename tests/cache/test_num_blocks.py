"""The number of device blocks, set after opening."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors import ConfigError, DeadlineExceeded, LayoutError, NumBlocksUnset
from kvactors.data_plane.engine import InlineCopies
from kvactors.device.host import HostDevice
from kvactors.errors import CacheClosed, DeviceError, RankError
from kvactors.layout import GQALayout
from kvactors.settings import DeviceConfig
from kvactors.testing.loop import simulate
from tests.cache.test_degraded import fail
from tests.ranks.simulated import Rank, load
from tests.ranks.simulated import settings as rank_settings
from tests.support.cache import BLOCK, opened, prompt, serve, settings

HOST = {"slots": 8, "transit_slots": 16}


def later(**options):
    """A cache of 0 device blocks."""
    return opened(device=0, inline=True, **options)


async def uses(cache, blocks: int) -> None:
    """The cache has so many device blocks, and every tier works."""
    assert cache.free_blocks() == (blocks, blocks, 0, 0, 0)
    assert cache.config.device.num_blocks == cache.device.num_blocks == blocks
    assert cache.statistics().prefix.blocks_total == blocks
    tokens = prompt(1, blocks)
    await serve(cache, "a", tokens)
    assert cache.lookup(tokens).device == blocks - 1
    if cache.config.host.slots:
        await serve(cache, "b", prompt(2, blocks))
        again = await serve(cache, "a", tokens)
        assert again.hits.host == min(blocks - 1, cache.config.host.slots)
    with pytest.raises(kvactors.NeverFits):
        await cache.acquire("large", prompt(3, blocks + 1))
    assert cache.health().status == "ok"


async def test_requests_are_refused_until_the_number_is_set():
    async with later(host=HOST) as cache:
        for refused in (
            lambda: cache.acquire("a", [1]),
            lambda: cache.acquire("a", [1], wait_for_room=True),
            lambda: cache.acquire("a", [1], chunk_tokens=4),
            lambda: cache.prefetch([1]),
            lambda: asyncio.to_thread(cache.from_thread.acquire, "a", [1]),
            lambda: asyncio.to_thread(cache.from_thread.lookup, [1]),
        ):
            with pytest.raises(NumBlocksUnset, match="set_num_blocks"):
                await refused()
        with pytest.raises(NumBlocksUnset):
            cache.lookup([1])
        assert cache.free_blocks() == (0, 0, 0, 0, 0)
        statistics = cache.statistics().prefix
        assert (statistics.blocks_total, statistics.no_room, statistics.requests) == (0, 0, 0)
        (reason,) = cache.health().reasons
        assert (reason.component, cache.health().status) == ("device", "degraded")
        assert cache.check() == []
        await cache.clear()
        await cache.set_namespace("other")
        await cache.pause()
        await cache.resume()
        await cache.set_num_blocks(6)
        await uses(cache, 6)


async def test_the_number_is_set_once():
    async with opened(device=4) as cache:
        with pytest.raises(ConfigError, match="is 4 already"):
            await cache.set_num_blocks(9)
        await uses(cache, 4)
    async with later() as cache:
        first, second = await asyncio.gather(
            cache.set_num_blocks(4), cache.set_num_blocks(5), return_exceptions=True
        )
        assert first is None
        assert isinstance(second, ConfigError)
        async with await cache.acquire("a", prompt(1, 3)):
            with pytest.raises(ConfigError, match="is 4 already"):
                await cache.set_num_blocks(9)
        assert cache.free_blocks().total == 4


LAYOUT = GQALayout(2, 1, 8, BLOCK, dtype="uint8")


class Gpu(HostDevice):
    kind = "cuda"


async def test_the_device_of_the_engine_is_given_late():
    async with later(host=HOST) as cache:
        device = HostDevice(LAYOUT, 7)
        for bad, wanted, match in (
            (HostDevice(LAYOUT, 6), ConfigError, "the device has 6"),
            (HostDevice(GQALayout(1, 1, 8, BLOCK, dtype="uint8"), 7), LayoutError, "layout"),
            (HostDevice(GQALayout(2, 1, 8, 8, dtype="uint8"), 7), LayoutError, "layout"),
            (Gpu(LAYOUT, 7), ConfigError, "of kind 'cuda'"),
        ):
            with pytest.raises(wanted, match=match):
                await cache.set_num_blocks(7, device=bad)
            assert not cache.system.sized
        await cache.set_num_blocks(7, device=device)
        assert cache.device is device
        await uses(cache, 7)


def test_the_number_cannot_be_set_late_for_a_store_that_registers_device_memory():
    store = {"backend": "attention_store", "write_policy": "write_through"}
    config = settings(device=0, storage=store)
    with pytest.raises(ConfigError, match=r"device.num_blocks is 0"):
        kvactors.system.System(config)


async def test_watermarks_and_limits_follow_the_number():
    marks = {"num_blocks": 0, "low_watermark": 0.5, "high_watermark": 0.75}
    config = settings().from_mapping({"cache": {"block_size": BLOCK}, "device": marks})
    assert isinstance(config.device, DeviceConfig)
    async with kvactors.open(config) as cache:
        await cache.set_num_blocks(40)
        core, wiring = cache.system.index_actor, cache.system
        assert (core.queue.free_low, core.queue.free_high) == (10, 20)
        assert core.index.capacity >= 40
        await cache.wait_idle()
        assert cache.system.notifier_actor.ledger.tree.idle_limit == wiring.idle_limit == 1064


@pytest.mark.parametrize("name", ["index", "notifier", "swapper"])
async def test_a_restart_keeps_the_number(name):
    """An incarnation is made with the number, or is sent it."""
    async with later(host=HOST) as cache:
        await fail(cache, name, 1)
        await cache.set_num_blocks(6)
        await fail(cache, name, 1)
        await cache.wait_idle()
        await uses(cache, 6)
        ledger = cache.system.notifier_actor.ledger
        assert ledger.tree.idle_limit == cache.system.idle_limit


class SlowEngine(InlineCopies):
    """Opens after `failing` attempts, in ten steps of the loop."""

    failing = 0

    async def open(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        if SlowEngine.failing:
            SlowEngine.failing -= 1
            raise DeviceError("no pinned memory")


def slow(cache) -> None:
    plane = cache.system.plane
    plane.make_engine = lambda device: SlowEngine(device, plane.arena)


async def test_a_device_that_does_not_open_changes_nothing():
    async with later(host=HOST) as cache:
        slow(cache)
        SlowEngine.failing = 1
        with pytest.raises(DeviceError, match="pinned"):
            await cache.set_num_blocks(6)
        with pytest.raises(NumBlocksUnset):
            await cache.acquire("a", [1])
        with pytest.raises(DeadlineExceeded):
            await cache.set_num_blocks(6, deadline=1e-9)
        assert not cache.system.shutdown.begun
        await cache.set_num_blocks(5)
        await uses(cache, 5)


async def test_the_cache_ends_while_the_number_is_set():
    class NeverOpens(InlineCopies):
        async def open(self) -> None:
            await asyncio.Event().wait()

    async with kvactors.open(settings(device=0)) as cache:
        plane = cache.system.plane
        plane.make_engine = lambda device: NeverOpens(device, plane.arena)
        task = asyncio.ensure_future(cache.set_num_blocks(6))
        await asyncio.sleep(0)
    with pytest.raises(CacheClosed):
        await task
    with pytest.raises(CacheClosed):
        await cache.set_num_blocks(6)


def test_ranks_join_when_the_number_is_set():
    async def main():
        config = rank_settings()
        late = rank_settings(device=DeviceConfig(num_blocks=0))
        ranks = [Rank(config, number) for number in range(2)]
        try:
            async with kvactors.open(late, inline_copies=True) as cache:
                assert [one.component for one in cache.health().reasons] == ["device"]
                for rank in ranks:
                    await rank.start()
                with pytest.raises(RankError, match="device blocks"):
                    await cache.set_num_blocks(15, deadline=60.0)
                for rank in ranks:
                    await rank.stop()
                    await rank.start()
                with pytest.raises(NumBlocksUnset):
                    await cache.acquire("a", [1])
                await cache.set_num_blocks(16)
                assert cache.health().status == "ok"
                assert cache.free_blocks().total == 16
                requests = load(cache, ranks)
                await requests.run(30)
                assert requests.wrong == requests.broken == 0
                assert sum(requests.hits)
        finally:
            for rank in ranks:
                await rank.close()

    simulate(main)
