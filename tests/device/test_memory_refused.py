"""Memory that the system does not give is a named error, for every kind of memory, and nothing
stays open."""

from __future__ import annotations

from typing import Any

import pytest

import kvactors
from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.errors import DeviceError, LayoutError
from kvactors.layout.gqa import GQALayout
from kvactors.tier_cache import SlotMemory

LAYOUT = GQALayout(2, 2, 32, 16, "bfloat16")
TOO_MANY = [1 << 40, 1 << 52, 1 << 60]
"""Blocks: more than the memory, than the addresses, than an integer of 64 bits of bytes."""


@pytest.mark.parametrize("blocks", TOO_MANY)
def test_device_memory(blocks: int) -> None:
    with pytest.raises(DeviceError, match=f"memory for {blocks} device blocks"):
        HostDevice(LAYOUT, blocks)


@pytest.mark.parametrize("slots", TOO_MANY)
def test_host_memory(slots: int) -> None:
    with pytest.raises(DeviceError, match=f"bytes of memory for {slots} host slots"):
        Arena(slots, LAYOUT.block_bytes)
    with pytest.raises(LayoutError, match="bytes of memory for host slots"):
        SlotMemory(slots, LAYOUT.block_bytes)


def test_tensors_of_paddle() -> None:
    pytest.importorskip("paddle")
    from kvactors.device.paddle import PaddleDevice

    with pytest.raises(DeviceError, match="memory at cpu for a tensor of"):
        PaddleDevice.allocate(LAYOUT, 1 << 40)


@pytest.mark.parametrize(
    "settings",
    [
        {"device": {"num_blocks": 1 << 31}},
        {"device": {"num_blocks": 4}, "host": {"slots": 1 << 31}},
    ],
)
async def test_a_cache_names_it(settings: dict[str, Any]) -> None:
    layout = {"num_layers": 64, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
    config = kvactors.Config.from_mapping(settings | {"layout": layout})
    with pytest.raises(DeviceError, match="memory for"):
        async with kvactors.open(config):
            pass


@pytest.mark.parametrize("make", [Arena, SlotMemory])
def test_host_memory_is_freed_once_and_outlived_by_its_views(make: Any) -> None:
    memory = make(2, 4096)
    view = memory.view(1)
    view[:] = b"\x07" * 4096
    memory.close()
    memory.close()
    assert bytes(view) == b"\x07" * 4096


async def test_a_number_of_blocks_that_is_too_large_can_be_set_again() -> None:
    config = kvactors.Config.from_mapping({"device": {"num_blocks": 0}})
    async with kvactors.open(config) as cache:
        with pytest.raises(DeviceError, match="memory for"):
            await cache.set_num_blocks(1 << 31)
        await cache.set_num_blocks(8)
        assert cache.check() == []
