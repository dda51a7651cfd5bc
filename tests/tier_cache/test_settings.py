"""Settings of a `TierCache` have the ranges of the same settings of a cache."""

from __future__ import annotations

import math

import pytest

from kvactors import ConfigError, open_tiers
from kvactors.settings.check import settings_of
from kvactors.settings.tables import SHARED, HostConfig, StorageConfig
from kvactors.tier_cache.settings import TierConfig, TierStorage, checked_config

NEEDED = {"model": "m", "block_bytes": 96, "num_slots": 4}


def test_settings_of_the_same_name_have_the_same_range():
    of_tier, of_cache = settings_of(TierStorage), settings_of(StorageConfig)
    shared = (of_tier.keys() & of_cache.keys()) - {*SHARED, "write_policy"}
    assert len(shared) > 10
    different = {name for name in shared if of_tier[name].hint != of_cache[name].hint}
    assert different == set()
    assert settings_of(TierConfig)["numa_node"] == settings_of(HostConfig)["numa_node"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("io_depth", 0),
        ("slot_timeout_s", -1.0),
        ("slot_timeout_s", math.nan),
        ("open_timeout_s", math.inf),
        ("close_timeout_s", 0.0),
        ("capacity_blocks", 0),
        ("write_policy", "sometimes"),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    storage = {"backend": "file", "directory": "d", name: value}
    for config in ({**NEEDED, "storage": storage}, given(storage)):
        with pytest.raises(ConfigError, match=rf"storage\.{name}"):
            checked_config(config)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model": ""}, "model"),
        ({"block_bytes": -1}, "block_bytes"),
        ({"policy": "best"}, "policy"),
        ({"slots": 3}, "slots"),
        ({"events": ["device"]}, "device"),
        ({"storage": {"backend": "file"}}, "directory"),
        ({"storage": {"backend": "attention_store"}}, "tokens"),
        ({"storage": {"backend": "memory", "rank": 1}}, "rank"),
        ({"storage": {"backend": "memory", "exclusive": True}}, "exclusive"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings, text):
    with pytest.raises(ConfigError, match=text):
        checked_config({**NEEDED, **settings})


def given(storage: dict[str, object]) -> TierConfig:
    return TierConfig(model="m", block_bytes=96, num_slots=4, storage=TierStorage(**storage))


@pytest.mark.parametrize(
    ("capacity", "slots"), [("8 MiB", 2048), (8 << 20, 2048), ("4KB", 1), (8191, 1)]
)
def test_the_host_tier_is_given_in_bytes(capacity, slots):
    needed = {"model": "m", "block_bytes": 96, "capacity_bytes": capacity}
    assert checked_config(needed).num_slots == slots
    config = checked_config(TierConfig(model="m", block_bytes=96, capacity_bytes=capacity))
    assert (config.num_slots, config.capacity_bytes) == (slots, None)
    assert config.fingerprint == checked_config(NEEDED).fingerprint


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({}, "set it or capacity_bytes"),
        ({"num_slots": 0}, "set it or capacity_bytes"),
        ({"num_slots": 4, "capacity_bytes": "1 MiB"}, "are two sizes of the host tier"),
        ({"capacity_bytes": 4095}, r"capacity_bytes is 4095 B|4 KiB, and one slot takes"),
        ({"capacity_bytes": "many"}, "capacity_bytes"),
        ({"capacity_bytes": -1}, "capacity_bytes"),
        ({"capacity_bytes": "9999999999 TB"}, "capacity_bytes must be at most 1024 TiB"),
    ],
)
def test_a_size_of_the_host_tier_that_cannot_be_is_named(sizes, error):
    with pytest.raises(ConfigError, match=error):
        checked_config({"model": "m", "block_bytes": 96, **sizes})


def test_a_cache_with_a_size_in_bytes_has_its_slots():
    cache = open_tiers({"model": "m", "block_bytes": 5000, "capacity_bytes": "64 KiB"})
    assert cache.memory.num_slots == cache.config.num_slots == 8
    cache.shutdown()
