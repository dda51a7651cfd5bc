"""Every kind of device, in every layout: blocks go to host slots, back, and to other blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvactors
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.local import make_device
from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.layout import DSALayout, GQALayout, MLALayout
from kvactors.settings import Config, DeviceConfig
from tests.support.cuda import opened_gpu

BLOCK, BLOCKS = 16, 6
BFLOAT16 = GQALayout(2, 2, 32, BLOCK, "bfloat16")
LAYOUTS = {
    "float16": GQALayout(2, 2, 32, BLOCK, "float16"),
    "bfloat16": BFLOAT16,
    "fp8": GQALayout(2, 2, 32, BLOCK, quantization="block_wise_fp8"),
    "odd": GQALayout(3, 1, 7, 5, "uint8"),
    "mla": MLALayout(2, BLOCK, 48, 16),
    "dsa": DSALayout(2, BLOCK, 128, 8),
    "varied": GQALayout(2, [1, 3, 2], [8, 7, 4], BLOCK, extra_layers=1, extra_block_ratio=2.0),
    "stage": MLALayout(2, BLOCK, 48, 16, layer_offset=30),
}


@pytest.fixture(params=["host", "cuda", pytest.param("paddle", marks=pytest.mark.full)])
def make(request: pytest.FixtureRequest) -> Any:
    """Makes a device of a layout."""
    if request.param == "cuda":
        with opened_gpu() as gpu:
            yield lambda layout: CudaDevice.allocate(layout, BLOCKS, driver=gpu.driver)
    else:
        config = DeviceConfig(kind=request.param, num_blocks=BLOCKS)
        yield lambda layout: make_device(config, layout)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_blocks_go_to_host_slots_and_come_back(make, name, shuffled):
    layout, rng = LAYOUTS[name], np.random.default_rng(5)
    device, twin = make(layout), HostDevice(layout, BLOCKS)
    arena, names = Arena(BLOCKS, layout.block_bytes), rng.bytes(32 * BLOCKS)
    ids = rng.permutation(BLOCKS).tolist() if shuffled else list(range(BLOCKS))
    slots = rng.permutation(BLOCKS).tolist() if shuffled else list(range(BLOCKS))
    device.fill(ids, names)
    assert device.check(ids, names) == []
    twin.fill(ids, names)
    device.copy_to_host(ids, arena, slots)
    for block, slot in zip(ids, slots, strict=True):
        pieces = [twin.region(piece.layer, piece.role)[block] for piece in layout.pieces]
        assert bytes(arena.view(slot)) == b"".join(piece.tobytes() for piece in pieces), (
            "all layers and roles in order"
        )
    device.fill(ids, bytes(32 * BLOCKS))
    for layer in range(layout.num_layers + layout.extra_layers):
        assert device.check(ids, names) == list(range(BLOCKS))
        device.copy_to_device(ids, arena, slots, range(layer, layer + 1))
    assert device.check(ids, names) == []
    device.fill(ids, bytes(32 * BLOCKS))
    device.copy_to_device(ids, arena, slots)
    assert device.check(ids, names) == []
    device.close()
    arena.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_block_is_copied_to_another_in_every_region(make, name):
    device, names = make(LAYOUTS[name]), bytes(range(64))
    device.fill([0, 5], names)
    device.fill([1, 2, 3, 4], bytes(128))
    device.copy_blocks((0, 5, 5), (2, 4, 1))
    assert device.check([0, 5, 2, 4, 1], names + names + names[32:]) == []
    assert device.check([3], bytes(32)) == []
    device.close()


def test_numbers_out_of_range(make):
    device, arena = make(BFLOAT16), Arena(2, BFLOAT16.block_bytes)
    for blocks, slots in (([6], [0]), ([0], [2]), ([-1], [0]), ([0, 1], [0])):
        for copy in (device.copy_to_host, device.copy_to_device):
            with pytest.raises(ValueError):
                copy(blocks, arena, slots)
    for sources, targets in (((1,), ()), ((1,), (6,)), ((-1,), (1,))):
        with pytest.raises(ValueError):
            device.copy_blocks(sources, targets)
    device.close()
    arena.close()


async def test_a_cache_brings_the_right_bytes_back(make):
    layout = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32, "dtype": "bfloat16"}
    config = Config.from_mapping(
        {"cache": {"block_size": BLOCK}, "host": {"slots": 16}, "layout": layout}
    )
    device = make(BFLOAT16)
    async with kvactors.open(config, device=device) as cache:
        for seed in (1, 2, 3, 1, 2, 3):
            async with await cache.acquire("r", [seed] * (3 * BLOCK + 1)) as lease:
                await lease.wait_ready()
                cached, keys = lease.cached_tokens // BLOCK, lease.hashes(0, 3)
                assert device.check(lease.block_table[:cached], keys[: 32 * cached]) == []
                device.fill(lease.block_table[cached:3], keys[32 * cached :])
                await lease.commit(3 * BLOCK)
        await cache.wait_idle()
        assert cache.statistics().host_hits >= 6
        assert cache.check() == []
    device.close()
