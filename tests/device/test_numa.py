"""The arena's memory comes from the NUMA node of the settings."""

from __future__ import annotations

import pytest

import kvactors
from kvactors.device.arena import Arena
from tests.support.cache import opened, prompt, serve, settings
from tests.support.numa import bound_node

HOST = {"slots": 4, "transit_slots": 4}


def test_an_arena_is_bound_to_its_node():
    arena = Arena(4, 5000, numa_node=0)
    try:
        assert bound_node(arena.address) == 0
        assert bound_node(arena.address + 3 * arena.stride) == 0
        arena.fresh.touch()
        arena.view(3)[0] = 7
        assert bound_node(arena.address) == 0
    finally:
        arena.close()


def test_an_arena_without_a_node_is_not_bound():
    arena = Arena(4, 5000)
    assert bound_node(arena.address) is None
    arena.close()


async def test_a_cache_binds_its_arena():
    async with opened(device=4, host={**HOST, "numa_node": 0}) as cache:
        assert bound_node(cache.system.arena.address) == 0
        await serve(cache, "first", prompt(1, 4))
        await serve(cache, "other", prompt(2, 4))
        await serve(cache, "first", prompt(1, 4))


def test_a_node_that_does_not_exist_is_named():
    with pytest.raises(kvactors.ConfigError, match="numa_node is 1023"):
        Arena(4, 5000, numa_node=1023)


async def test_a_cache_on_a_missing_node_does_not_open():
    with pytest.raises(kvactors.ConfigError, match="numa_node is 1023"):
        async with kvactors.open(settings(host={**HOST, "numa_node": 1023})):
            pass


@pytest.mark.parametrize("node", [-1, 1024, 1.5, "0"])
def test_a_number_out_of_range_is_refused(node):
    with pytest.raises(kvactors.ConfigError, match="numa_node"):
        settings(host={**HOST, "numa_node": node})
