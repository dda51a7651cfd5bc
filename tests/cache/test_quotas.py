"""Quotas, priorities, times to live, pins and clears by salt, through the public API."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors import Hints, Step
from kvactors.prefix_index.settings import OBSERVED_REQUESTS
from kvactors.settings import CacheConfig, DeviceConfig, HostConfig
from kvactors.testing.loop import simulate
from tests.support.cache import opened

BLOCK = 4


def tokens_of(number: int, blocks: int = 2) -> list[int]:
    return list(range(1000 * number, 1000 * number + BLOCK * blocks))


async def use(cache, number, *, salt=None, hints=None, end=None, blocks=2):
    tokens = tokens_of(number, blocks)
    lease = await cache.acquire(f"{salt} {number}", tokens, salt=salt, hints=hints)
    await lease.wait_ready()
    await lease.finish(len(tokens), hints=end)
    return lease


def held(cache, number, *, salt=None, blocks=2) -> int:
    """Blocks of a prompt on the device."""
    return cache.lookup([*tokens_of(number, blocks), 1], salt=salt).device


def hosted(cache, number, *, salt=None, blocks=2) -> int:
    return cache.lookup([*tokens_of(number, blocks), 1], salt=salt).host


async def settle(cache) -> None:
    await cache.wait_idle()
    await cache.wait_flushed()
    assert cache.check() == []
    assert cache.count_divergent_blocks() == 0


@pytest.mark.parametrize("call", ["fork", "extend", "reserve", "step"])
async def test_blocks_that_a_lease_takes_later_count_for_the_quota_of_its_salt(call):
    async with opened(device=8, quota={"device": 4}) as cache:
        await use(cache, 1, salt="quiet")
        await use(cache, 2, salt="noisy")
        await use(cache, 3, salt="noisy")
        lease = await cache.acquire("open", [*tokens_of(4, 1), 1], salt="noisy")
        if call == "fork":
            await (await lease.fork()).finish()
        elif call == "extend":
            await lease.extend([1] * BLOCK)
        elif call == "reserve":
            await lease.reserve(BLOCK)
        else:
            (found,) = await cache.step([Step(lease, [1] * BLOCK)])
            assert len(found.blocks) == 1
        assert held(cache, 1, salt="quiet") == 2
        await lease.finish()
        await settle(cache)


async def test_a_quota_is_kept_in_the_host_tier():
    host = {"slots": 4, "transit_slots": 8}
    async with opened(device=4, host=host, quota={"host": 2}) as cache:
        await use(cache, 1, salt="quiet")
        await use(cache, 2, salt="noisy", blocks=4)
        for number in range(3, 9):
            await use(cache, number, salt="noisy", blocks=4)
        await cache.wait_idle()
        assert hosted(cache, 1, salt="quiet") == 2
        await settle(cache)


async def test_a_quota_can_be_changed_while_the_cache_runs():
    async with opened(device=8) as cache:
        await use(cache, 1, salt="quiet")
        await use(cache, 2, salt="noisy")
        await cache.set_quota("noisy", device=4)
        for number in range(3, 12):
            await use(cache, number, salt="noisy")
        assert held(cache, 1, salt="quiet") == 2
        with pytest.raises(ValueError, match="device"):
            await cache.set_quota("noisy", device=0)
        with pytest.raises(ValueError, match="one block takes"):
            await cache.set_quota("noisy", device="1 B")


async def test_blocks_of_a_lower_priority_leave_first():
    async with opened(device=8) as cache:
        await use(cache, 1, hints=Hints(priority=1))
        await use(cache, 2)
        await use(cache, 3, hints=Hints(priority=-1))
        await use(cache, 4)
        await use(cache, 5)
        assert [held(cache, n) for n in range(1, 6)] == [2, 2, 0, 2, 2]
        await use(cache, 6, blocks=4)
        assert [held(cache, n) for n in range(1, 6)] == [2, 0, 0, 0, 2]
        await settle(cache)


async def test_pinned_blocks_stay_up_to_the_share():
    async with opened(device=8, hints={"pin_share": 0.5}) as cache:
        lease = await use(cache, 1, hints=Hints(pin=True))
        assert lease.pinned_blocks == 2
        refused = await use(cache, 2, blocks=3, hints=Hints(pin=True))
        assert refused.pinned_blocks == 0
        for number in range(3, 9):
            await use(cache, number, blocks=4)
        assert held(cache, 1) == 2
        assert held(cache, 2, blocks=3) == 0
        assert cache.system.index_actor.pins.refused == 1
        assert await cache.unpin(tokens_of(1)) == 2
        assert await cache.unpin(tokens_of(1)) == 0
        await use(cache, 9, blocks=8)
        assert held(cache, 1) == 0
        await settle(cache)


async def test_a_pin_of_finish_is_of_the_output_too():
    async with opened(device=16, hints={"pin_share": 1.0}) as cache:
        lease = await cache.acquire("r", tokens_of(1), hints=Hints(pin=True))
        await lease.extend(tokens_of(2))
        await lease.finish(4 * BLOCK)
        assert lease.pinned_blocks == 2
        lease = await cache.acquire("r", tokens_of(1))
        await lease.extend(tokens_of(2))
        await lease.finish(4 * BLOCK, hints=Hints(pin=True))
        assert lease.pinned_blocks == 4
        assert await cache.unpin([*tokens_of(1), *tokens_of(2)]) == 4
        assert cache.system.index_actor.index.tree.pinned == 2


async def test_a_clear_ends_pins():
    async with opened(device=8, host={"slots": 4}) as cache:
        await use(cache, 1, hints=Hints(pin=True))
        await cache.clear()
        assert cache.system.index_actor.index.tree.pinned == 0
        await use(cache, 2, blocks=8)
        await settle(cache)


async def test_a_lease_of_before_a_clear_of_its_salt_caches_nothing():
    async with opened(device=8) as cache:
        lease = await cache.acquire("open", tokens_of(1, 2), salt="a")
        await cache.clear(salt="a")
        await lease.finish(2 * BLOCK)
        assert held(cache, 1, salt="a") == 0
        await settle(cache)


# -- times to live


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


# -- policies


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        ({}, {}, "retain"),
        ({"policy": "lru"}, {}, "lru"),
        ({}, {"policy": "lru"}, "lru"),
        ({"policy": "retain"}, {"policy": "lru"}, "lru"),
        ({"policy": "lru"}, {"policy": "retain"}, "retain"),
    ],
)
async def test_a_host_policy_that_is_not_set_is_that_of_the_device(device, host, expected):
    config = kvactors.Config(
        device=DeviceConfig(num_blocks=8, **device), host=HostConfig(slots=8, **host)
    )
    async with kvactors.open(config) as cache:
        assert cache.system.index_actor.index.policy.host is (expected == "retain")


async def evictions(policy, requests):
    """The blocks that the device evicts while prompts of two blocks come one after another, some of
    them again. One of them is asked for often."""
    gone: list[tuple[int, ...]] = []
    device = DeviceConfig(num_blocks=8, policy=policy)
    config = kvactors.Config(cache=CacheConfig(block_size=1), device=device)
    async with kvactors.open(config) as cache:
        held: set[int] = set()
        for number in range(requests):
            name = 0 if number % 4 == 0 else number
            async with await cache.acquire("r", [2 * name, 2 * name + 1, 1000]) as lease:
                await lease.wait_ready()
                await lease.finish(2)
            held |= {2 * name, 2 * name + 1}
            there = {
                one for one in held if cache.lookup([one & ~1, one | 1, 1000]).device > one % 2
            }
            gone.append(tuple(sorted(held - there)))
            held = there
    return gone


async def test_the_first_requests_after_a_start_are_evicted_by_lru():
    lru, retain = [await evictions(policy, 3 * OBSERVED_REQUESTS) for policy in ("lru", "retain")]
    assert retain[:OBSERVED_REQUESTS] == lru[:OBSERVED_REQUESTS]
    assert retain != lru
