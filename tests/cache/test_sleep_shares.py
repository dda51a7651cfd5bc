"""Sleep of a cache with pins, quotas, forks, waiting calls and transfers, and its cancellation."""

from __future__ import annotations

import asyncio

import pytest

from kvactors import Hints
from kvactors.errors import CacheAsleep
from tests.cache.test_quotas import held, hosted, settle, use
from tests.cache.test_sleep import HOST, TOKENS, stored
from tests.support.cache import opened, serve


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


STEPS = [*range(12), *range(12, 60, 4)]


@pytest.mark.parametrize("steps", STEPS)
async def test_a_cancelled_wake_leaves_the_cache_asleep_or_awake(steps, tmp_path):
    async with opened(device=8, host=HOST, storage=stored(tmp_path), inline=True) as cache:
        await serve(cache, "a", TOKENS)
        await cache.sleep(2)
        call = asyncio.ensure_future(cache.wake())
        for _ in range(steps):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        while True:  # a wake that has taken memory goes on to its end
            try:
                await cache.wake()
                break
            except CacheAsleep:
                await asyncio.sleep(0)
        assert cache.health() == ("ok", ())
        assert (await serve(cache, "a", TOKENS)).hits.storage == 3
