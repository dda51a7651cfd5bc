"""One SDK object for each shard in a process, and what it is opened with."""

from __future__ import annotations

import asyncio
import sys
from queue import SimpleQueue

import numpy as np
import pytest

import kvactors
from kvactors.device.host import HostDevice
from kvactors.errors import SdkError
from kvactors.layout import MLALayout
from kvactors.settings import Config
from kvactors.settings.sinks import AttentionStoreConfig
from kvactors.storage.attention_sdk import Sdk, complete, gpu_of, sdk_settings
from kvactors.storage.attention_store import AttentionStoreBackend
from tests.storage.test_attention_store_backend import BLOCK, LAYOUT, STAND_IN, store_over
from tests.support import attentionstore_sdk as stand_in
from tests.support import cache as support
from tests.support.attentionstore_sdk.client.client import AttentionType

PROMPT = list(range(4 * BLOCK + 1))


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


def inits() -> int:
    return sum(call.name == "init" for one in stand_in.services.values() for call in one.calls)


def config(**tables) -> Config:
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK},
            "device": {"num_blocks": 16},
            "layout": {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8},
            "storage": {"backend": "attention_store", "write_policy": "write_through"},
            "attention_store": {"sdk": STAND_IN},
            "flush": {"sinks": [{"kind": "attention_store"}]},
            **tables,
        }
    )


async def serve(cache, prompt=PROMPT) -> int:
    lease = await support.serve(cache, "r", prompt)
    await cache.wait_flushed()
    return lease.hits.storage


# -- one object


async def test_the_sink_and_the_back_end_share_one_sdk_object():
    async with kvactors.open(config()) as cache:
        assert await serve(cache) == 0
        await cache.clear()
        assert await serve(cache) == 4
    assert inits() == 1


async def test_a_cache_that_is_opened_again_uses_the_object_that_is_there():
    for found in (0, 4):
        async with kvactors.open(config()) as cache:
            assert await serve(cache) == found
    assert inits() == 1


async def test_two_caches_at_once_share_it_too():
    async with kvactors.open(config()) as one, kvactors.open(config(flush={"sinks": []})) as other:
        assert (await serve(one), await serve(other)) == (0, 4)
    assert inits() == 1


async def test_two_handles_that_are_opened_at_the_same_moment_make_one_object():
    stand_in.service().stuck = 0.2
    settings = complete(AttentionStoreConfig(sdk=STAND_IN, ready_interval_s=0.01), LAYOUT)
    handles = [Sdk(settings, "index"), Sdk(settings, "storage"), Sdk(settings, "storage")]
    await asyncio.gather(*(one.open() for one in handles))
    assert inits() == 1
    assert len({id(one.connection) for one in handles}) == 1
    for one in handles:
        one.close()


async def test_an_object_that_could_not_be_made_is_made_at_the_next_attempt():
    stand_in.service().broken = "no licence"
    with pytest.raises(SdkError, match="no licence"):
        async with kvactors.open(config()):
            pass
    stand_in.service().broken = ""
    async with kvactors.open(config()) as cache:
        await serve(cache)
    assert inits() == 2


async def test_the_names_of_another_layout_are_refused():
    async with kvactors.open(config()) as cache:
        await serve(cache)
    other = config(layout={"num_layers": 4, "num_kv_heads": 2, "head_dim": 8})
    with pytest.raises(
        SdkError,
        match="one SDK object for each shard, and names must differ between models, layouts and "
        "devices",
    ):
        async with kvactors.open(other):
            pass
    assert inits() == 1


async def test_flushes_do_not_wait_for_a_write_that_takes_long():
    settings = complete(AttentionStoreConfig(sdk=STAND_IN), LAYOUT)
    index, storage = Sdk(settings, "index"), AttentionStoreBackend(settings, HostDevice(LAYOUT, 8))
    await index.open()
    await storage.open()
    held = stand_in.service().hold = SimpleQueue()
    path = np.arange(BLOCK, dtype="<u4")
    saving = asyncio.create_task(storage.save(path.tobytes(), 0, (0,), 60.0))
    while not any(
        call.name == "match" and call.arguments[1:] == (0, 60.0)
        for call in stand_in.service().calls
    ):
        await asyncio.sleep(0.01)
    stand_in.service().hold = None
    await index.flush(path, 0, resident=True)
    assert not saving.done()
    held.put(None)
    assert await saving == 1
    index.close()
    await storage.close()


async def test_the_medium_is_imported_for_the_index_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, f"{STAND_IN}.api.common.common_pb2", None)
    async with kvactors.open(config(flush={"sinks": []})) as cache:
        await serve(cache)
    with pytest.raises(SdkError, match="cannot be imported"):
        async with kvactors.open(config()):
            pass


# -- derived settings


class Gpu(HostDevice):
    """Reports that its memory is on GPU 3, although the bytes are in host memory."""

    kind = "cuda"
    ordinal = 3


def test_platform_and_device_are_those_of_the_cache():
    def passed(settings: dict, given=None, **tables):
        made = Config.from_mapping(
            {
                "attention_store": settings,
                "flush": {"sinks": [{"kind": "attention_store"}]},
                **tables,
            }
        )
        found = sdk_settings(made, LAYOUT, given)
        return found.cuda, found.device_id

    assert passed({}, Gpu(LAYOUT, 2)) == (True, 3)
    assert passed({}, HostDevice(LAYOUT, 2)) == (False, 0)
    assert passed({"device_id": 5}, Gpu(LAYOUT, 2)) == (True, 5)
    assert passed({"platform": "other"}, Gpu(LAYOUT, 2)) == (False, 3)
    assert passed({"platform": "cuda"}, HostDevice(LAYOUT, 2)) == (True, 0)
    assert passed({}, device={"kind": "cuda", "ordinal": 2}) == (True, 2)
    assert passed({}, device={"kind": "paddle", "place": "gpu:6"}) == (True, 6)
    assert passed({}, device={"kind": "paddle", "place": "cpu"}) == (False, 0)


@pytest.mark.parametrize(("compiled", "gpu"), [(True, 0), (False, None)])
def test_a_leader_goes_by_the_paddle_that_is_imported(monkeypatch, compiled, gpu):
    class Paddle:
        @staticmethod
        def is_compiled_with_cuda() -> bool:
            return compiled

    monkeypatch.setitem(sys.modules, "paddle", Paddle)
    ranks = {"count": 2, "endpoint": "memory://x"}
    made = Config.from_mapping(
        {"layout": {"num_kv_heads": 2, "tensor_parallel": 2}, "ranks": ranks}
    )
    assert gpu_of(made, None) == gpu


# -- MLA


async def test_keys_without_values_need_the_longer_argument_list():
    layout = MLALayout(3, BLOCK, 24, 8)
    with pytest.raises(kvactors.LayoutError, match="platform = 'cuda'"):
        store_over(HostDevice(layout, 4))
    store = store_over(HostDevice(layout, 4), platform="cuda")
    await store.open()
    (call,) = [call for call in stand_in.service().calls if call.name == "init"]
    assert call.arguments[1]["attention_type"] is AttentionType.MLA
    await store.close()


# -- faults of the service


@pytest.mark.parametrize("from_root", [False, True])
async def test_either_meaning_of_match_is_right(from_root):
    store = store_over(HostDevice(LAYOUT, 16))
    await store.open()
    stand_in.service().from_root = from_root
    path = np.arange(6 * BLOCK, dtype="<u4")
    names = np.random.default_rng(1).bytes(32 * 6)
    store_device = HostDevice(LAYOUT, 16)
    store.regions = (
        [int(a) for a in store_device.regions][::2],
        [int(a) for a in store_device.regions][1::2],
    )
    store_device.fill(range(6), names)
    assert await store.save(path[: 3 * BLOCK].tobytes(), 0, (0, 1, 2), 5.0) == 3
    assert await store.save(path.tobytes(), 2, (2, 3, 4, 5), 5.0) == 4
    assert len(stand_in.service().objects) == 6 * 3, "every block of the path is stored"
    assert await store.fetch(path.tobytes(), 2, (8, 9, 10, 11), 5.0) == 4
    assert store_device.check([8, 9, 10, 11], names[64:]) == []
    await store.close()


async def test_a_full_service_evicts_and_an_evicted_block_is_a_miss():
    async with kvactors.open(config(device={"num_blocks": 64})) as cache:
        stand_in.service("m").capacity = 6
        for seed in range(6):
            await serve(cache, [seed] * 17)
        assert stand_in.service("m").evicted >= 18
        assert len(stand_in.service("m").objects) <= 6 * 3
        found = []
        for seed in range(6):
            await cache.clear()
            found.append(await serve(cache, [seed] * 17))
        assert cache.check() == []
        assert max(found) <= 4
        assert min(found) == 0


async def test_time_outs_are_passed_and_end_a_call():
    store = store_over(HostDevice(LAYOUT, 8), write_slice_timeout_s=0.1, write_total_timeout_s=0.5)
    await store.open()
    stand_in.service().slow = 30.0
    path = np.arange(2 * BLOCK, dtype="<u4").tobytes()
    began = asyncio.get_running_loop().time()
    assert await store.fetch(path, 0, (0, 1), 0.2) == 0
    assert await store.save(path, 0, (0, 1), 5.0) == 0
    assert asyncio.get_running_loop().time() - began < 15.0, (
        "no call lasted as long as the service takes"
    )
    assert store.statistics().unavailable == 4
    await store.close()
