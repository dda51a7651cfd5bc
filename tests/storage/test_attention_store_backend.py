"""AttentionStore as storage: bytes between device memory and the stand-in of its service, without
host slots."""

from __future__ import annotations

import asyncio
from queue import SimpleQueue

import numpy as np
import pytest

import kvactors
from kvactors.device.host import HostDevice
from kvactors.errors import SdkError
from kvactors.layout import DSALayout, GQALayout, MLALayout
from kvactors.settings import Config
from kvactors.settings.sinks import AttentionStoreConfig
from kvactors.storage.attention_sdk import complete
from kvactors.storage.attention_store import AttentionStoreBackend
from tests.support import attentionstore_sdk as stand_in
from tests.support import cache as support

STAND_IN = "tests.support.attentionstore_sdk"
BLOCK = 4
LAYOUT = GQALayout(3, 2, 8, BLOCK)


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


def calls(name: str):
    return [call.arguments for call in stand_in.service().calls if call.name == name]


def store_over(device: HostDevice, **changes) -> AttentionStoreBackend:
    store = AttentionStoreConfig(sdk=STAND_IN, **changes)
    return AttentionStoreBackend(complete(store, device.layout), device)


async def backend(layout=LAYOUT, **changes) -> AttentionStoreBackend:
    made = store_over(HostDevice(layout, 16), **changes)
    await made.open()
    return made


def path(blocks: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, blocks * BLOCK, dtype="<u4").tobytes()


@pytest.mark.parametrize(
    ("platform", "layout"),
    [("other", LAYOUT), ("cuda", LAYOUT), ("cuda", MLALayout(3, BLOCK, 24, 8))],
)
async def test_bytes_go_from_device_blocks_to_the_store_and_back_into_others(platform, layout):
    store = await backend(layout, platform=platform)
    names, device = np.random.default_rng(2).bytes(32 * 6), HostDevice(layout, 16)
    mine = store_over(device, platform=platform)
    await mine.open()
    device.fill([3, 1, 7, 2, 9, 4], names)
    assert await mine.save(path(6), 0, (3, 1, 7, 2, 9, 4), 5.0) == 6
    assert await mine.fetch(path(6), 2, (10, 11, 12, 13), 5.0) == 4
    assert device.check([10, 11, 12, 13], names[64:]) == []
    assert await mine.fetch(path(6, seed=9), 0, (0, 5), 5.0) == 0
    options = calls("read")[0][-1]
    assert options == ({"remote_addrs": None} if platform == "cuda" else {})
    assert calls("write")[0][-1] == (
        {"h2h_copy": False, "params": None} if platform == "cuda" else {}
    )
    for one in (store, mine):
        await one.close()


async def test_writes_go_in_slices_and_stop_at_the_first_that_is_short():
    store = await backend(write_slice_blocks=4)
    assert await store.save(path(10), 0, tuple(range(10)), 5.0) == 10
    made = [
        (len(tokens.ids) // BLOCK, start, list(blocks))
        for _, tokens, start, _, _, blocks, _ in calls("write")
    ]
    assert made == [(4, 0, [0, 1, 2, 3]), (8, 4, [4, 5, 6, 7]), (10, 8, [8, 9])], (
        "each with the path up to its end"
    )
    tried = []

    async def no_space(*args):
        tried.append(args)
        raise SdkError("no space")

    store.sdk.write = no_space
    assert await store.save(path(10, seed=2), 0, tuple(range(10)), 5.0) == 0
    assert len(tried) == 1, "the other slices would leave a gap"
    await store.close()


async def test_only_blocks_missing_in_the_store_are_written():
    """Blocks that the store evicted between two saves are written again, present ones are not."""
    store = await backend()
    tokens, blocks = path(6), tuple(range(6))
    assert await store.save(tokens, 0, blocks, 5.0) == 6
    assert await store.save(tokens, 0, blocks, 5.0) == 6
    assert len(calls("write")) == 1
    assert store.writes == 6
    for one in [one for one in stand_in.service().objects if len(one[0]) > 4 * BLOCK]:
        del stand_in.service().objects[one]
    assert await store.save(tokens, 0, blocks, 5.0) == 6
    assert [(start, list(written)) for _, _, start, _, _, written, _ in calls("write")[1:]] == [
        (4, [4, 5])
    ]
    assert store.writes == 8
    await store.close()


async def test_a_total_time_out_ends_between_slices():
    store = await backend(write_slice_blocks=2, write_total_timeout_s=0.5)
    stand_in.service().slow = 0.2
    assert 2 <= await store.save(path(10), 0, tuple(range(10)), 5.0) < 10
    await store.close()


async def test_errors_are_counts_and_open_the_circuit():
    store = await backend()
    stand_in.service().broken = "it is broken"
    for _ in range(5):
        assert await store.fetch(path(2), 0, (0, 1), 5.0) == 0
    assert store.statistics().unavailable == 10
    assert store.statistics().breaker == "open"
    before = len(stand_in.service().calls)
    assert await store.fetch(path(2), 0, (0, 1), 5.0) == 0
    assert len(stand_in.service().calls) == before, "it is left alone"
    await store.close()


@pytest.mark.parametrize("how", ["raises", "takes nothing"])
async def test_writes_that_fail_are_named_while_reads_work(how):
    device = HostDevice(LAYOUT, 16)  # its memory is read into
    store = store_over(device)
    await store.open()
    assert await store.save(path(2), 0, (0, 1), 5.0) == 2

    async def fails(*_args):
        if how == "raises":
            raise SdkError("read-only")
        return 0

    real, store.sdk.write = store.sdk.write, fails
    for seed in range(5):
        assert not list(store.attempts.failing())
        assert await store.save(path(2, seed=10 + seed), 0, (0, 1), 5.0) == 0
        assert await store.fetch(path(2), 0, (2, 3), 5.0) == 2
    (failing,) = store.attempts.failing()
    assert failing.why.startswith("no write has worked")
    assert ("read-only" in failing.why) == (how == "raises")
    store.sdk.write = real
    assert await store.save(path(2), 0, (0, 1), 5.0) == (0 if how == "raises" else 2)
    assert list(store.attempts.failing()), "blocks that are stored already prove nothing"
    if how != "raises":
        assert await store.save(path(2, seed=30), 0, (0, 1), 5.0) == 2
        assert not list(store.attempts.failing())
    await store.close()


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        (DSALayout(1, BLOCK), "key, indexer"),
        (
            GQALayout(2, 2, 8, BLOCK, quantization="block_wise_fp8"),
            "key, value, key_scale, value_scale",
        ),
    ],
)
def test_layouts_it_cannot_hold_are_named(layout, roles):
    """Its calls have no pointers to them. The other back ends store them."""
    with pytest.raises(kvactors.LayoutError, match=roles):
        store_over(HostDevice(layout, 2))


# -- a whole cache


def config(**tables) -> Config:
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK, "default_deadline_s": 5.0},
            "device": {"num_blocks": 12},
            "layout": {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8},
            "storage": {"backend": "attention_store"},
            "attention_store": {"sdk": STAND_IN},
            "flush": {"sinks": [{"kind": "memory"}, {"kind": "attention_store"}]},
            **tables,
        }
    )


async def serve(cache, seed: int, blocks: int = 6) -> kvactors.Hits:
    tokens = [seed % 2] * BLOCK + [seed] * (BLOCK * (blocks - 1) + 1)
    return (await support.serve(cache, f"r{seed}", tokens)).hits


@pytest.mark.parametrize("host", [{}, {"slots": 8}])
async def test_blocks_come_back_from_the_store_byte_for_byte(host):
    async with kvactors.open(config(host=host)) as cache:
        for seed in range(8):
            await serve(cache, seed)
            await cache.wait_idle()
        hits = []
        for seed in range(8):
            hits.append(await serve(cache, seed))
            await cache.wait_idle()
        assert sum(one.storage for one in hits) >= 20
        assert all(one.device + one.host + one.storage == 6 for one in hits)
        await cache.wait_flushed()
        assert (cache.count_divergent_blocks(), cache.check()) == (0, [])
        assert cache.statistics().store.reads >= 20


async def test_a_new_process_finds_the_blocks_that_an_earlier_one_wrote():
    async with kvactors.open(config()) as cache:
        await serve(cache, 3)
    async with kvactors.open(config()) as cache:
        assert await serve(cache, 3) == kvactors.Hits(0, 0, 6)


async def test_many_at_once_and_the_service_failing_now_and_then():
    # Writes that the service delays hold device blocks: enough for every prompt at once, so that no
    # failed load lacks blocks.
    async with kvactors.open(config(device={"num_blocks": 300})) as cache:

        async def client(first: int) -> None:
            for round_ in range(8):
                await serve(cache, (first + round_ * 3) % 10)
                stand_in.service().broken = "for a while" if round_ == 3 else ""

        await asyncio.gather(*(client(i) for i in range(4)))
        await cache.wait_flushed()
        assert (cache.count_divergent_blocks(), cache.check()) == (0, [])
        index = cache.statistics().prefix
        assert index.leases == index.nodes_referenced == 0


def release(held):
    """Release the held calls and all later ones."""
    stand_in.service().hold = None
    for _ in range(100):
        held.put(None)


async def test_a_slow_read_holds_its_blocks_but_not_the_request_beyond_its_deadline():
    async with kvactors.open(
        config(
            device={"num_blocks": 24},
            cache={"model": "m", "block_size": BLOCK, "default_deadline_s": 0.3},
        )
    ) as cache:
        await serve(cache, 3)
        await cache.wait_idle()
        await cache.clear()
        held = stand_in.service().hold = SimpleQueue()
        lease = await cache.acquire("late", [1] * BLOCK + [3] * (BLOCK * 5 + 1))
        try:
            await lease.wait_ready(deadline=30.0)
            assert lease.cached_tokens == 0
        finally:
            lease.abandon()
        release(held)
        await cache.wait_idle(20.0)
        assert cache.check() == []


async def test_a_call_that_does_not_return_is_shown_and_no_request_waits_for_it():
    tables = {
        "cache": {"model": "m", "block_size": BLOCK, "default_deadline_s": 3.0},
        "device": {"num_blocks": 64},
        "storage": {
            "backend": "attention_store",
            "write_policy": "write_through",
            "timeout_s": 0.2,
        },
    }
    async with kvactors.open(config(**tables)) as cache:
        await serve(cache, 3)
        await cache.wait_idle()
        held = stand_in.service().hold = SimpleQueue()
        await serve(cache, 5)
        while cache.health().status == "ok":
            await asyncio.sleep(0.02)
        assert [(one.component, one.why) for one in cache.health().reasons] == [
            ("device store", "a call does not return")
        ]
        stand_in.service().hold = None
        for seed in (7, 9, 11):
            assert (await serve(cache, seed)).storage == 0
        assert cache.health().status == "degraded", "three requests were served during one call"
        release(held)
        await cache.wait_idle(20.0)
        assert cache.health().status == "ok"
        assert cache.check() == []


@pytest.mark.parametrize(
    "storage",
    [{"write_policy": "write_back"}, {"write_policy": "write_through", "exclusive": True}],
)
async def test_unsupported_settings_are_an_error_at_start(storage):
    with pytest.raises(kvactors.ConfigError, match="attention_store moves blocks"):
        async with kvactors.open(config(storage={"backend": "attention_store", **storage})):
            pass


async def test_in_flush_only_mode_it_is_neither_read_nor_written():
    async with kvactors.open(
        config(flush={"mode": "flush_only", "sinks": [{"kind": "attention_store"}]})
    ) as cache:
        await serve(cache, 3)
        await cache.wait_flushed()
        assert not calls("write")
        assert not calls("read")
        assert calls("flush_token_index")


def test_slices_by_variables():
    environ = {
        "AS_WRITE_SLICE_BLOCK_NUM": "7",
        "AS_WRITE_SLICE_TIMEOUT": "2.5",
        "AS_WRITE_TOTAL_TIMEOUT": "9",
    }
    store = Config.from_env(environ).attention_store
    assert (store.write_slice_blocks, store.write_slice_timeout_s, store.write_total_timeout_s) == (
        7,
        2.5,
        9.0,
    )
    with pytest.raises(kvactors.ConfigError, match="AS_WRITE_SLICE_BLOCK_NUM must be a number"):
        Config.from_env({"AS_WRITE_SLICE_BLOCK_NUM": "many"})
