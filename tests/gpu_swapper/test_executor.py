"""Copies layer by layer: reported layers have arrived, in order, and a failure stops the report."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import kvactors
from kvactors.data_plane import engine as module
from kvactors.data_plane.base import Direction
from kvactors.data_plane.engine import InlineCopies, ThreadedCopies
from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.layout import DSALayout, GQALayout, MLALayout
from kvactors.settings import CacheConfig, Config, DeviceConfig, HostConfig, LayoutConfig

LAYOUTS = {
    "gqa": GQALayout(5, 2, 32, 16),
    "fp8": GQALayout(5, 2, 32, 16, quantization="block_wise_fp8"),
    "mla": MLALayout(4, 16),
    "dsa": DSALayout(3, 16),
    "mtp": GQALayout(3, 1, 64, 16, extra_layers=2, extra_block_ratio=1.0),
}


class Slow(HostDevice):
    """Records which layers were copied, and fails from a layer on."""

    def __init__(self, layout, num_blocks, fail_from=None):
        super().__init__(layout, num_blocks)
        self.copied, self.fail_from = [], fail_from

    def copy_to_device(self, blocks, arena, slots, layers=None):
        if self.fail_from is not None and layers is not None and layers.stop > self.fail_from:
            raise ValueError("planted failure")
        super().copy_to_device(blocks, arena, slots, layers)
        self.copied.append(layers)


def loaded(layout, kind, threads=1, **options):
    device, arena = Slow(layout, 6, **options), Arena(6, layout.block_bytes)
    names = b"".join(bytes([i]) * 32 for i in range(6))
    device.fill(range(6), names)
    device.copy_to_host(range(6), arena, range(6))
    for region in device._memory:
        region[:] = 0
    given = (threads,) if kind is ThreadedCopies else ()
    return device, kind(device, arena, *given), names


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "threads"), [(InlineCopies, 1), (ThreadedCopies, 1), (ThreadedCopies, 3)]
)
async def test_reported_pairs_have_arrived(layout, kind, threads, monkeypatch):
    monkeypatch.setattr(module, "PIECE", 1)
    device, executor, names = loaded(layout, kind, threads)
    total, whole = layout.num_layers + layout.extra_layers, HostDevice(layout, 6)
    whole.fill(range(6), names)
    reported = []

    def progress(layers):
        reported.append(layers)
        there = layout.span(range(layers)).stop
        for mine, theirs in zip(device._memory[:there], whole._memory[:there], strict=True):
            assert np.array_equal(mine[[4, 0, 2]], theirs[[4, 0, 2]])

    executor_groups = executor.layer_groups
    monkeypatch.setattr(executor, "layer_groups", lambda pairs, least=1: executor_groups(pairs, 1))
    assert await executor.run(Direction.TO_DEVICE, [4, 0, 2], [4, 0, 2], progress) == ()
    await executor.close()
    assert reported == sorted(set(reported))
    assert reported[-1] == total
    assert len(reported) > 1 or kind is ThreadedCopies  # threads may be faster than the loop
    assert device.check([4, 0, 2], b"".join(names[32 * i : 32 * i + 32] for i in (4, 0, 2))) == []


@pytest.mark.parametrize("kind", [InlineCopies, ThreadedCopies])
async def test_a_layer_that_fails_fails_its_pairs_and_ends_the_report(kind, monkeypatch):
    _, executor, _ = loaded(LAYOUTS["gqa"], kind, fail_from=3)
    groups = executor.layer_groups
    monkeypatch.setattr(executor, "layer_groups", lambda pairs, least=1: groups(pairs, 1))
    reported = []
    assert await executor.run(Direction.TO_DEVICE, [0, 1], [0, 1], reported.append) == (0, 1)
    await executor.close()
    assert max(reported) == 3


def test_groups_cover_all_layers_and_are_worth_their_while():
    device = HostDevice(LAYOUTS["gqa"], 2)
    executor = InlineCopies(device, Arena(2, device.layout.block_bytes))
    layer = device.layout.block_bytes // 5
    for least, sizes in ((1, [1] * 5), (layer * 4, [2, 2, 1]), (1 << 30, [5])):
        groups = executor.layer_groups(2, least)
        assert [len(group) for group in groups] == sizes
        assert [layer for group in groups for layer in group] == list(range(5))


@pytest.mark.parametrize("layerwise", [True, False])
async def test_layers_are_ready_one_by_one(layerwise, monkeypatch):
    """A lease's first layer is ready before its last one, and the blocks that `wait_layer` reports
    have their bytes in it."""
    layout, device = LayoutConfig(num_layers=6), DeviceConfig(num_blocks=8, layerwise=layerwise)
    config = Config(
        cache=CacheConfig(block_size=16), device=device, layout=layout, host=HostConfig(slots=16)
    )
    gate: list[asyncio.Future[None]] = []

    class Gated(InlineCopies):
        """Loads wait at every layer until they are released."""

        async def run(self, direction, blocks, slots, progress=None):
            if direction is Direction.TO_HOST:
                return await super().run(direction, blocks, slots)
            layers = self.layer_groups(len(blocks), 1) if progress is not None else [None]
            for one in layers:
                gate.append(asyncio.get_running_loop().create_future())
                await gate[-1]
                self.copy(direction, blocks, slots, one)
                if progress is not None:
                    progress(one.stop)
            return ()

    monkeypatch.setattr(
        "kvactors.data_plane.local.make_engine",
        lambda device, arena, config, inline: Gated(device, arena),
    )
    async with kvactors.open(config) as cache:
        prompt = list(range(5 * 16))
        for tokens in (prompt, [9] * 8 * 16):  # the second drives the first out to the host
            async with await cache.acquire("a", tokens) as lease:
                full = len(tokens) // 16
                cache.device.fill(lease.block_table[:full], lease.hashes(0, full))
                await lease.commit(len(tokens))
        lease = await cache.acquire("b", prompt)
        assert lease.pending
        with pytest.raises(ValueError, match="layer must be between 0 and 5, not 6"):
            await lease.wait_layer(6)
        first, last = (asyncio.get_running_loop().create_task(lease.wait_layer(i)) for i in (0, 5))
        while not gate:
            await asyncio.sleep(0)
        assert not first.done()
        passed = 0
        while not last.done():
            if passed < len(gate) and not gate[passed].done():
                gate[passed].set_result(None)
                passed += 1
            for _ in range(20):
                await asyncio.sleep(0)
            if passed == 1:
                assert first.done() is True
                assert last.done() is not layerwise
        assert passed == (6 if layerwise else 1)
        assert await first == await last == 4 * 16  # the last token is computed again
        await lease.wait_ready()
        assert lease.cached_tokens == 4 * 16
        assert await lease.wait_layer(3) == 4 * 16
        await lease.finish()
        await cache.wait_idle()
        assert cache.check() == []
