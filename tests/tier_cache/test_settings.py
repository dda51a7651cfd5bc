"""Settings of a `TierCache` have the ranges of the same settings of a cache."""

from __future__ import annotations

import math

import pytest

from kvactors import ConfigError
from kvactors.config_tables import HostConfig, StorageConfig
from kvactors.ranges import hints_of
from kvactors.tier_cache.settings import TierConfig, TierStorage, checked_config

NEEDED = {"model": "m", "block_bytes": 96, "num_slots": 4}


def test_settings_of_the_same_name_have_the_same_range():
    of_tier, of_cache = hints_of(TierStorage), hints_of(StorageConfig)
    shared = (of_tier.keys() & of_cache.keys()) - {"mooncake"}
    assert len(shared) > 10
    different = {name for name in shared if of_tier[name] != of_cache[name]}
    assert different == set()
    assert hints_of(TierConfig)["numa_node"] == hints_of(HostConfig)["numa_node"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("io_depth", 1_000_000),
        ("io_depth", 0),
        ("ranks", 0),
        ("min_hits", 0),
        ("timeout_s", 0.0),
        ("timeout_s", math.nan),
        ("timeout_s", math.inf),
        ("slot_timeout_s", -1.0),
        ("slot_timeout_s", math.nan),
        ("open_timeout_s", math.inf),
        ("close_timeout_s", 0.0),
        ("capacity_blocks", 0),
        ("capacity_bytes", "many"),
        ("free_space_floor", -1),
        ("directory", "a\0b"),
        ("write_policy", "sometimes"),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    storage = {"backend": "file", "directory": "d", name: value}
    for config in ({**NEEDED, "storage": storage}, given(storage)):
        with pytest.raises(ConfigError, match=rf"storage\.{name}"):
            checked_config(config)


def given(storage: dict[str, object]) -> TierConfig:
    return TierConfig(model="m", block_bytes=96, num_slots=4, storage=TierStorage(**storage))
