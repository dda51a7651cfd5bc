"""Which tiers evict by RETAIN."""

from __future__ import annotations

import pytest

import kvactors
from kvactors.prefix_index.settings import OBSERVED_REQUESTS
from kvactors.settings import CacheConfig, DeviceConfig, HostConfig


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
