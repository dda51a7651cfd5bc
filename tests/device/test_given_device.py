"""A device that is given to `open`, and settings that describe another one."""

from __future__ import annotations

import pytest

import kvactors
from kvactors.device.host import HostDevice
from kvactors.layout import GQALayout, make_layout
from kvactors.settings import Config

LAYOUT = GQALayout(1, 1, 8, 4)


def config(**tables) -> Config:
    return Config.from_mapping({"cache": {"block_size": 4}, **tables})


async def test_the_config_of_the_cache_reports_the_given_device():
    async with kvactors.open(config(), device=HostDevice(LAYOUT, 7)) as cache:
        assert cache.config.device.num_blocks == 7
        assert cache.statistics().prefix.blocks_total == 7


@pytest.mark.parametrize(
    ("tables", "error", "complaint"),
    [
        (
            {"device": {"num_blocks": 9}},
            kvactors.ConfigError,
            "num_blocks is 9, and the given device has 7",
        ),
        (
            {"layout": {"num_layers": 2}},
            kvactors.LayoutError,
            "another layout than the given device",
        ),
        ({"cache": {"block_size": 8}}, kvactors.LayoutError, "blocks hold 4 tokens"),
    ],
)
async def test_settings_that_describe_another_device_are_named(tables, error, complaint):
    with pytest.raises(error, match=complaint):
        async with kvactors.open(config(**tables), device=HostDevice(LAYOUT, 7)):
            pass


async def test_settings_that_describe_the_given_device_are_taken():
    tables = {
        "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8},
        "device": {"num_blocks": 7},
    }
    settings = config(**tables)
    async with kvactors.open(
        settings, device=HostDevice(make_layout(settings.layout, 4), 7)
    ) as cache:
        assert cache.config == settings
