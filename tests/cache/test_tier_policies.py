"""Which tiers evict by RETAIN."""

from __future__ import annotations

import pytest

import kvactors
from kvactors.config import DeviceConfig, HostConfig
from kvactors.cpu_evictor.policy import POLICIES


@pytest.mark.parametrize(
    ("device", "host", "expected"),
    [
        ({}, {}, "lru"),
        ({"policy": "retain"}, {}, "retain"),
        ({"policy": "retain"}, {"policy": "lru"}, "lru"),
        ({}, {"policy": "retain"}, "retain"),
        ({"policy": "lru"}, {"policy": "retain"}, "retain"),
    ],
)
async def test_a_host_policy_that_is_not_set_is_that_of_the_device(device, host, expected):
    config = kvactors.Config(
        device=DeviceConfig(num_blocks=8, **device), host=HostConfig(slots=8, **host)
    )
    async with kvactors.open(config) as cache:
        assert type(cache.system.evictor_actor.host.policy) is POLICIES[expected]
        assert cache.system.index_actor.core.index.policy.host is (expected == "retain")
