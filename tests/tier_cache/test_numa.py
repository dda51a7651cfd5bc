"""The host slots of a `TierCache` come from the NUMA node of the settings."""

from __future__ import annotations

import mmap

import pytest

from kvactors import ConfigError, open_tiers
from tests.support.numa import bound_node

SETTINGS = {"model": "m", "block_bytes": 5000, "num_slots": 4}


def test_slots_are_bound_to_their_node_and_hold_bytes():
    cache = open_tiers({**SETTINGS, "numa_node": 0})
    assert bound_node(cache.memory.address) == 0
    assert bound_node(cache.memory.address + 3 * cache.memory.stride) == 0
    cache.memory.view(3)[:] = b"x" * 5000
    assert bytes(cache.memory.view(3)) == b"x" * 5000
    cache.shutdown()


def test_slots_without_a_node_are_not_bound():
    cache = open_tiers(SETTINGS)
    assert bound_node(cache.memory.address) is None
    cache.shutdown()


def test_given_memory_is_bound_if_it_begins_at_a_page():
    memory = mmap.mmap(-1, 6 * 8192)
    cache = open_tiers({**SETTINGS, "numa_node": 0}, memory=memory, stride=8192)
    assert bound_node(cache.memory.address) == 0
    cache.shutdown()
    with pytest.raises(ConfigError, match="does not begin at a page"):
        open_tiers({**SETTINGS, "numa_node": 0}, memory=memoryview(memory)[64:], stride=8192)


@pytest.mark.parametrize("node", [-1, 1024, 1.5, "0", 1023])
def test_a_node_that_does_not_exist_is_named(node):
    with pytest.raises(ConfigError, match="numa_node"):
        open_tiers({**SETTINGS, "numa_node": node})
