"""Times to live and pins that expire, through the public API on a loop of virtual time, and hints
and quotas at the ends of their ranges."""

from __future__ import annotations

import asyncio

import pytest

from kvactors import Hints
from kvactors.testing.loop import simulate
from tests.cache.test_quotas import held, settle, tokens_of, use
from tests.support.cache import opened

DAY = 86_400.0


def in_virtual_time(main, **options):
    """Run a test on a cache without threads."""

    async def run() -> None:
        async with opened(inline=True, **options) as cache:
            await main(cache)

    simulate(run)


@pytest.mark.parametrize("later", [9.0, 11.0])
def test_blocks_leave_before_others_once_their_time_is_over(later):
    async def main(cache):
        await use(cache, 1, hints=Hints(priority=2, ttl=10.0))
        await asyncio.sleep(later)
        await use(cache, 2)
        await use(cache, 3)
        await use(cache, 4)
        await use(cache, 5)
        assert [held(cache, n) for n in (1, 2)] == ([2, 0] if later < 10 else [0, 2])
        await settle(cache)

    in_virtual_time(main)


def test_a_pin_ends_with_its_time():
    async def main(cache):
        lease = await use(cache, 1, hints=Hints(pin=True, ttl=10.0))
        assert lease.pinned_blocks == 2
        for number in range(2, 6):
            await use(cache, number, blocks=4)
        assert held(cache, 1) == 2
        await asyncio.sleep(10.5)
        prefix = cache.statistics().prefix
        assert (prefix.pinned, prefix.pins_expired) == (0, 1)
        await use(cache, 6, blocks=7)
        assert held(cache, 1) == 0
        assert await cache.unpin(tokens_of(1)) == 0
        await settle(cache)

    in_virtual_time(main)


@pytest.mark.parametrize("start", [0.0, 1e9])
def test_a_pin_ends_when_its_time_is_over_on_the_clocks_of_cache_and_loop(start):
    """A replay of past requests has a clock that stands still, or leaps, between requests."""
    time = [start]

    async def run() -> None:
        async with opened(inline=True, clock=lambda: time[0]) as cache:
            prefix = cache.statistics
            await use(cache, 1, hints=Hints(pin=True, ttl=10.0))
            await asyncio.sleep(50.0)
            assert (prefix().prefix.pinned, prefix().prefix.pins_expired) == (2, 0)
            time[0] += 10.0
            await asyncio.sleep(10.5)
            assert (prefix().prefix.pinned, prefix().prefix.pins_expired) == (0, 1)
            await use(cache, 2, hints=Hints(pin=True, ttl=10.0))
            time[0] += DAY
            await asyncio.sleep(9.5)
            assert prefix().prefix.pinned == 2
            await asyncio.sleep(1.0)
            assert prefix().prefix.pinned == 0
            await settle(cache)

    simulate(run)
