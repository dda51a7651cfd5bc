"""Sizes in blocks and in bytes: the same numbers as an open cache allocates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvactors
from kvactors.capacity import block_bytes
from kvactors.device.host import HostDevice
from kvactors.errors import ConfigError
from kvactors.layout import GQALayout
from kvactors.settings import Config
from kvactors.settings.check import in_bytes
from tests.config.size_reports import size_report

TINY = {"num_layers": 2, "num_kv_heads": 1, "head_dim": 40}
"""Blocks of 2,560 bytes at 8 tokens, so that a slot and an object are larger than a block."""

PAGE = 4096


def config(**tables) -> Config:
    return Config.from_mapping({"cache": {"block_size": 8}, "layout": TINY, **tables})


def memory(device: HostDevice) -> int:
    """Bytes of the arrays of a device."""
    return sum(device.region(p.layer, p.role).nbytes for p in device.layout.pieces)


def stored(folder, **storage):
    table = {"backend": "file", "directory": str(folder), "free_space_floor": 0, **storage}
    return {"cache": {"block_size": 8, "model": "m"}, "storage": table}


async def test_sizes_in_bytes_are_those_that_an_open_cache_allocates(tmp_path):
    tables = {
        "device": {"capacity_bytes": "100 KiB"},
        "host": {"capacity_bytes": "1 MiB", "transit_bytes": 5 * PAGE + 1},
        **stored(tmp_path, capacity_bytes="200KB"),
    }
    async with kvactors.open({**tables, "layout": TINY}) as cache:
        system = cache.system
        device = memory(system.device)
        block = system.layout.block_bytes
        assert device <= 100 << 10 < device + block
        assert cache.config.device.num_blocks == system.device.num_blocks == (100 << 10) // block
        assert cache.config.host.slots == (1 << 20) // system.arena.stride
        assert cache.config.host.transit_slots == 5
        assert system.arena.num_slots == cache.config.host.slots + 5
        assert system.arena.nbytes <= (1 << 20) + 5 * PAGE + 1
        each = block_bytes(system.layout, cache.config.storage)
        assert (each.device, each.host) == (block, system.arena.stride)
        store = system.backend.supply
        assert each.storage == PAGE, "an object takes whole pages of the disk"
        assert store.capacity * PAGE <= 200 << 10 < (store.capacity + 1) * PAGE


async def test_the_report_has_the_numbers_of_an_open_cache(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(
        "[cache]\nblock_size = 8\nmodel = 'm'\n[layout]\nnum_layers = 2\nnum_kv_heads = 1\n"
        "head_dim = 40\n[device]\ncapacity_bytes = '64 KiB'\n[host]\nslots = 7\n"
        f"[storage]\nbackend = 'file'\ndirectory = '{tmp_path}/store'\ncapacity_bytes = '1MB'\n"
    )
    report = size_report(file)
    async with kvactors.open(file) as cache:
        tiers = {one.tier: one for one in report.tiers}
        assert tiers["device"].blocks == cache.system.device.num_blocks
        assert tiers["device"].bytes == memory(cache.system.device)
        assert tiers["host"].blocks + tiers["transit"].blocks == cache.system.arena.num_slots
        assert tiers["host"].bytes + tiers["transit"].bytes == cache.system.arena.nbytes
        assert tiers["storage"].blocks == cache.system.backend.supply.capacity
        assert report.token_bytes * 8 == cache.system.layout.block_bytes


@pytest.mark.parametrize(
    ("table", "name", "size", "complaint"),
    [
        ("device", "capacity_bytes", 2559, "is 2.5 KiB, and one block"),
        ("host", "capacity_bytes", PAGE - 1, "is .*takes 4 KiB"),
        ("host", "transit_bytes", PAGE - 1, "is .*takes 4 KiB"),
    ],
)
async def test_a_size_that_holds_no_block_is_named(table, name, size, complaint):
    with pytest.raises(ConfigError, match=rf"{table}\.{name} {complaint}"):
        async with kvactors.open(config(**{table: {name: size}})):
            pass


async def test_a_given_device_has_its_own_size():
    layout = GQALayout(2, 1, 40, 8)
    fitting = config(device={"capacity_bytes": 7 * layout.block_bytes + 1})
    async with kvactors.open(fitting, HostDevice(layout, 7)) as cache:
        assert cache.config.device.num_blocks == 7
    other = config(device={"capacity_bytes": "1 MiB"})
    with pytest.raises(ConfigError, match=r"is '1 MiB', that is 409 blocks, and .* 7"):
        async with kvactors.open(other, HostDevice(layout, 7)):
            pass


@given(
    layers=st.integers(1, 5),
    extra=st.integers(0, 3),
    ratio=st.floats(1, 4),
    nbytes=st.integers(0, 1 << 22),
)
def test_the_most_blocks_that_fit_some_bytes(layers, extra, ratio, nbytes):
    layout = GQALayout(layers, 1, 8, 4, extra_layers=extra, extra_block_ratio=ratio)
    blocks = layout.blocks_in(nbytes)
    assert layout.device_bytes(blocks) <= nbytes < layout.device_bytes(blocks + 1)
    if blocks:
        device = HostDevice(layout, blocks)
        assert memory(device) == layout.device_bytes(blocks)


def test_units():
    sizes = {"8 GiB": 8 << 30, "8GB": 8 << 30, "1.5m": 3 << 19, " 7 ": 7, "2 tb": 2 << 40}
    assert {text: in_bytes(text, "x") for text in sizes} == sizes
    for wrong in ("", "GB", "-1", "8 XB", "1e9", "8 GiBs", True, 1.5):
        with pytest.raises(ConfigError, match="x must be a size"):
            in_bytes(wrong, "x")
