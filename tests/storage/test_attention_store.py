"""AttentionStore over the stand-in of its service: bytes between device memory and the service, the
answers of its SDK, one SDK object for each shard, and what tokens alone do not name."""

from __future__ import annotations

import asyncio
import sys
from queue import SimpleQueue
from types import SimpleNamespace

import anyio
import numpy as np
import pytest

import kvactors
from kvactors.attention_sdk import Sdk, complete, gpu_of, sdk_settings
from kvactors.device.host import HostDevice
from kvactors.errors import DeadlineExceeded, SdkError, StoreUnsupported
from kvactors.layout import DSALayout, GQALayout, Layout, MLALayout, Role
from kvactors.settings import Config
from kvactors.settings.sinks import AttentionStoreConfig
from kvactors.storage.attention_store import AttentionStoreBackend
from tests.support import attentionstore_sdk as stand_in
from tests.support import cache as support
from tests.support.attentionstore_sdk.client.client import AttentionType
from tests.support.attentionstore_sdk.sdk import AttentionStoreSDK

STAND_IN = "tests.support.attentionstore_sdk"
BLOCK = 4
LAYOUT = GQALayout(3, 2, 8, BLOCK)
PROMPT = list(range(4 * BLOCK + 1))
INDEX = {"sinks": [{"kind": "attention_store"}]}


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


def calls(name: str):
    return [call.arguments for call in stand_in.service().calls if call.name == name]


def store_over(device: HostDevice, **changes) -> AttentionStoreBackend:
    store = AttentionStoreConfig(sdk=STAND_IN, **changes)
    return AttentionStoreBackend(complete(store, device.layout), device)


async def backend(**changes) -> AttentionStoreBackend:
    made = store_over(HostDevice(LAYOUT, 16), **changes)
    await made.open()
    return made


def path(blocks: int, seed: int = 1) -> bytes:
    return np.random.default_rng(seed).integers(0, 1000, blocks * BLOCK, dtype="<u4").tobytes()


def handle(use="storage", **changes) -> Sdk:
    store = AttentionStoreConfig(sdk=STAND_IN, **changes)
    return Sdk(complete(store, LAYOUT), use)


def config(*, model="m", namespace="default", **tables) -> Config:
    return Config.from_mapping(
        {
            "cache": {
                "model": model,
                "namespace": namespace,
                "block_size": BLOCK,
                "default_deadline_s": 5.0,
            },
            "device": {"num_blocks": 16},
            "layout": {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8},
            "storage": {"backend": "attention_store", "write_policy": "write_through"},
            "attention_store": {"sdk": STAND_IN},
            **tables,
        }
    )


async def serve(cache, tokens=PROMPT, **identity) -> int:
    """Serve one request, verified. Returns the blocks found in storage."""
    lease = await support.serve(cache, "r", tokens, **identity)
    await cache.wait_flushed()
    await cache.clear()
    return lease.hits.storage


def prompt(seed: int) -> list[int]:
    return [seed % 2] * BLOCK + [seed] * (5 * BLOCK + 1)


# -- moves between device memory and the store


@pytest.mark.parametrize(
    ("platform", "layout"),
    [("other", LAYOUT), ("cuda", LAYOUT), ("cuda", MLALayout(3, BLOCK, 24, 8))],
)
async def test_bytes_go_from_device_blocks_to_the_store_and_back_into_others(platform, layout):
    names, device = np.random.default_rng(2).bytes(32 * 6), HostDevice(layout, 16)
    store = store_over(device, platform=platform)
    await store.open()
    device.fill([3, 1, 7, 2, 9, 4], names)
    assert await store.save(path(6), 0, (3, 1, 7, 2, 9, 4), 5.0) == 6
    assert await store.fetch(path(6), 2, (10, 11, 12, 13), 5.0) == 4
    assert device.check([10, 11, 12, 13], names[64:]) == []
    assert await store.fetch(path(6, seed=9), 0, (0, 5), 5.0) == 0
    options = calls("read")[0][-1]
    assert options == ({"remote_addrs": None} if platform == "cuda" else {})
    assert calls("write")[0][-1] == (
        {"h2h_copy": False, "params": None} if platform == "cuda" else {}
    )
    await store.close()


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


@pytest.mark.parametrize("from_root", [False, True])
async def test_either_meaning_of_match_is_right(from_root):
    device = HostDevice(LAYOUT, 16)
    store = store_over(device)
    await store.open()
    stand_in.service().from_root = from_root
    path = np.arange(6 * BLOCK, dtype="<u4")
    names = np.random.default_rng(1).bytes(32 * 6)
    device.fill(range(6), names)
    assert await store.save(path[: 3 * BLOCK].tobytes(), 0, (0, 1, 2), 5.0) == 3
    assert await store.save(path.tobytes(), 2, (2, 3, 4, 5), 5.0) == 4
    assert len(stand_in.service().objects) == 6 * 3, "every block of the path is stored"
    assert await store.fetch(path.tobytes(), 2, (8, 9, 10, 11), 5.0) == 4
    assert device.check([8, 9, 10, 11], names[64:]) == []
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


class SharedValues(Layout):
    """Values in every second layer."""

    kind = "shared values"

    def roles(self, layer):
        return [Role(name, (BLOCK, 8), "uint8") for name in ("key", "value")[: 1 + layer % 2]]


@pytest.mark.parametrize(
    ("layout", "roles"),
    [
        (DSALayout(1, BLOCK), "key, indexer"),
        (GQALayout(2, [1, 2], 8, BLOCK), "layers of one shape"),
        (SharedValues(BLOCK, 4), "layers of one shape"),
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


async def test_keys_without_values_need_the_longer_argument_list():
    layout = MLALayout(3, BLOCK, 24, 8)
    with pytest.raises(kvactors.LayoutError, match="platform = 'cuda'"):
        store_over(HostDevice(layout, 4))
    store = store_over(HostDevice(layout, 4), platform="cuda")
    await store.open()
    (call,) = [call for call in stand_in.service().calls if call.name == "init"]
    assert call.arguments[1]["attention_type"] is AttentionType.MLA
    await store.close()


# -- answers of the SDK


@pytest.mark.parametrize(("not_ready", "probes", "pauses"), [(0, 1, 0), (1, 2, 1), (2, 3, 2)])
async def test_it_pauses_between_two_probes_and_not_after_the_last(
    monkeypatch, not_ready, probes, pauses
):
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    clock = SimpleNamespace(fail_after=anyio.fail_after, sleep=sleep)
    monkeypatch.setattr("kvactors.attention_sdk.anyio", clock)
    stand_in.service().not_ready = not_ready
    one = handle(ready_interval_s=5.0)
    await one.open()
    one.close()
    assert len(calls("match")) == probes
    assert slept == [5.0] * pauses


async def test_a_service_that_is_never_ready_is_a_timeout_error():
    stand_in.service().not_ready = 10**9
    one = handle(ready_interval_s=0.005, ready_timeout_s=0.05)
    with pytest.raises(TimeoutError, match=r"not ready in 0\.05 s") as found:
        await one.open()
    one.close()
    assert isinstance(found.value, DeadlineExceeded)


@pytest.mark.parametrize("when", ["made", "probed"])
async def test_an_error_at_the_start_has_the_sdks_words_and_ends_the_wait(monkeypatch, when):
    """Any other text than the one of a service that will be ready soon."""
    one = handle(ready_interval_s=60.0)
    if when == "made":
        stand_in.service().broken = "no licence"
    else:
        connect = one._construct

        def made():
            found = connect()
            stand_in.service().broken = "no licence"
            return found

        monkeypatch.setattr(one, "_construct", made)
    with pytest.raises(SdkError, match="no licence"):
        await one.open()
    stand_in.service().broken = ""
    await one.open()
    assert await one.match(_tokens(2), 0, 5.0) == 0
    one.close()


def _tokens(blocks: int):
    return np.frombuffer(path(blocks), "<u4")


@pytest.mark.parametrize("platform", ["other", "cuda"])
@pytest.mark.parametrize("least", [0, 1, 3])
async def test_the_number_that_the_sdk_returns_is_the_result(platform, least):
    """The blocks behind the first that did not arrive count as missing, although they were found."""
    device = HostDevice(LAYOUT, 16)
    store = store_over(device, platform=platform)
    await store.open()
    device.fill(range(4), bytes(range(128)))
    service = stand_in.service()
    service.counts = lambda count: min(count, least)
    assert await store.save(path(4), 0, (0, 1, 2, 3), 5.0) == least
    assert store.writes == least
    service.counts = None
    assert await store.save(path(4), 0, (0, 1, 2, 3), 5.0) == 4
    assert await store.sdk.match(_tokens(4), 1, 5.0) == 3
    found, read = store.sdk.match, []

    async def all_of_them(*arguments) -> int:
        count = await found(*arguments)
        service.counts = lambda moved: read.append(moved) or min(moved, least)
        return count

    store.sdk.match = all_of_them
    assert await store.fetch(path(4), 0, (8, 9, 10, 11), 5.0) == least
    assert (read, store.reads) == ([4], least)
    await store.close()


class Panic(BaseException):
    """As an extension module may raise it."""


WRONG = [
    5,
    1 << 40,
    -1,
    None,
    "2",
    2.0,
    True,
    np.float64(2),
    [2],
    Panic("panic"),
    asyncio.CancelledError(),
    SystemExit(1),
    OSError(),
]


def broken(answer):
    def call(self, *arguments, **options):
        if isinstance(answer, BaseException):
            raise answer
        return answer

    return call


@pytest.mark.parametrize("answer", WRONG, ids=repr)
@pytest.mark.parametrize("name", ["read", "write", "match"])
async def test_a_wrong_answer_is_a_miss_that_is_counted(name, answer, monkeypatch):
    store = store_over(HostDevice(LAYOUT, 8))
    await store.open()
    path = np.arange(2 * BLOCK, dtype="<u4").tobytes()
    assert await store.save(path, 0, (0, 1), 5.0) == 2
    with monkeypatch.context() as patch:
        patch.setattr(AttentionStoreSDK, name, broken(answer))
        before = store.statistics().unavailable
        if name == "match" and type(answer) is int and answer > 2:
            assert await store.fetch(path, 0, (2, 3), 5.0) == 2, "what read gives counts"
        else:
            other = np.arange(9, 9 + 2 * BLOCK, dtype="<u4").tobytes()
            moved = await (
                store.save(other, 0, (2, 3), 5.0)
                if name == "write"
                else store.fetch(path, 0, (2, 3), 5.0)
            )
            assert (moved, store.statistics().unavailable) == (0, before + 2)
    assert await store.fetch(path, 0, (2, 3), 5.0) == 2
    await store.close()


@pytest.mark.parametrize("answer", [9, -1, None, "2", 2.0, RuntimeError("x")], ids=repr)
async def test_a_back_end_that_gives_no_count_costs_a_miss_and_no_actor(answer, monkeypatch):
    async with kvactors.open(config()) as cache:
        assert await serve(cache) == 0

        async def fetch(*arguments):
            if isinstance(answer, Exception):
                raise answer
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(cache.system.device_store, "fetch", fetch)
            assert await serve(cache) == 0
        assert await serve(cache) == 4
        assert cache.check() == []


# -- one object


def inits() -> int:
    return sum(call.name == "init" for one in stand_in.services.values() for call in one.calls)


async def test_the_sink_and_the_back_end_share_one_sdk_object():
    async with kvactors.open(config(flush=INDEX)) as cache:
        assert await serve(cache) == 0
        assert await serve(cache) == 4
    assert inits() == 1


async def test_a_cache_that_is_opened_again_uses_the_object_that_is_there():
    for found in (0, 4):
        async with kvactors.open(config(flush=INDEX)) as cache:
            assert await serve(cache) == found
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
        for call in list(stand_in.service().calls)
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
    async with kvactors.open(config()) as cache:
        await serve(cache)
    with pytest.raises(SdkError, match="cannot be imported"):
        async with kvactors.open(config(flush=INDEX)):
            pass


# -- derived settings


class Gpu(HostDevice):
    """Reports that its memory is on GPU 3, although the bytes are in host memory."""

    kind = "cuda"
    ordinal = 3


def test_platform_and_device_are_those_of_the_cache():
    def passed(settings: dict, given=None, **tables):
        made = Config.from_mapping({"attention_store": settings, "flush": INDEX, **tables})
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


# -- a whole cache


@pytest.mark.parametrize("host", [{}, {"slots": 8}])
async def test_blocks_come_back_from_the_store_byte_for_byte(host):
    sinks = [{"kind": "memory"}, {"kind": "attention_store"}]
    async with kvactors.open(config(host=host, flush={"sinks": sinks})) as cache:
        assert [await serve(cache, prompt(seed)) for seed in range(8)].count(0) >= 2
        assert [await serve(cache, prompt(seed)) for seed in range(8)] == [6] * 8
        await cache.wait_flushed()
        assert (cache.count_divergent_blocks(), cache.check()) == (0, [])
        assert cache.statistics().store.reads >= 48


def release(held):
    """Release the held calls and all later ones."""
    stand_in.service().hold = None
    for _ in range(100):
        held.put(None)


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
        await serve(cache, prompt(3))
        held = stand_in.service().hold = SimpleQueue()
        await support.serve(cache, "r", prompt(5))
        while cache.health().status == "ok":
            await asyncio.sleep(0.02)
        assert [(one.component, one.why) for one in cache.health().reasons] == [
            ("device store", "a call does not return")
        ]
        stand_in.service().hold = None
        for seed in (7, 9, 11):
            assert (await support.serve(cache, "r", prompt(seed))).hits.storage == 0
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


# -- what tokens alone do not name is neither stored nor read


OTHERS = [
    {"salt": "a"},
    {"salt": ""},
    {"salt": "b", "lora": "x"},
    {"lora": "x"},
    {"extra_keys": [(0, 3, "cat.png")]},
]


@pytest.mark.parametrize("identity", OTHERS)
async def test_another_scope_or_medium_is_neither_read_nor_written(identity):
    async with kvactors.open(config()) as cache:
        assert await serve(cache, **identity) == 0
        assert not stand_in.service().objects, "nothing that tokens alone would name is stored"
        assert await serve(cache) == 0
        assert await serve(cache, **identity) == 0, "the plain request's bytes"
        assert await serve(cache) == 4


async def test_blocks_from_a_medium_on_are_neither_stored_nor_read():
    async with kvactors.open(config()) as cache:
        image = [(2 * BLOCK + 1, 2, "cat.png")]
        assert await serve(cache, extra_keys=image) == 0
        assert len({path for path, _ in stand_in.service().objects}) == 2
        assert await serve(cache, extra_keys=image) == 2
        assert await serve(cache, extra_keys=[(2 * BLOCK + 1, 2, "dog.png")]) == 2
        assert await serve(cache) == 2
        assert await serve(cache) == 4
        assert await serve(cache, extra_keys=image) == 2


async def test_a_block_completed_by_decoding_keeps_its_medium():
    async with kvactors.open(config(device={"num_blocks": 32})) as cache:
        head, tail = list(range(BLOCK + 3)), [9]
        for image in ("cat.png", "dog.png"):
            async with await cache.acquire("r", head, extra_keys=[(BLOCK, 2, image)]) as lease:
                await lease.wait_ready()
                await lease.extend([*tail, 7])
                await lease.commit(lease.num_tokens)
        for media, cached in (([(BLOCK, 2, "cat.png")], 2), ([(BLOCK, 2, "eel.png")], 1), ([], 1)):
            async with await cache.acquire("r", [*head, *tail, 7], extra_keys=media) as lease:
                await lease.wait_ready()
                assert lease.cached_tokens == cached * BLOCK


async def test_after_a_change_of_namespace_the_store_is_not_used_until_the_first_one_is_back():
    async with kvactors.open(config()) as cache:
        assert await serve(cache) == 0
        await cache.set_namespace("weights-2")
        before = len(stand_in.service().calls)
        assert await serve(cache) == 0
        assert await serve(cache) == 0
        assert len(stand_in.service().calls) == before
        await cache.set_namespace("default")
        assert await serve(cache) == 4


async def test_models_and_namespaces_have_their_own_names_at_the_service():
    scopes = [{"model": "a"}, {"model": "b"}, {"model": "a", "namespace": "w2"}]
    for found in (0, 4):
        for scope in scopes:
            async with kvactors.open(config(**scope)) as cache:
                assert await serve(cache) == found
    assert len(stand_in.services) == 3


async def test_names_that_are_set_are_passed_as_they_are():
    table = {"sdk": STAND_IN, "namespace": "ns", "model_version": "v7"}
    async with kvactors.open(config(model="", attention_store=table)) as cache:
        assert cache.config.cache.model == "ns/v7"
        await serve(cache)
    assert list(stand_in.services) == [("ns", "default_pod_mixed_0", "v7", 0)]


async def test_clear_is_refused_before_anything_is_cleared():
    async with kvactors.open(config()) as cache:
        async with await cache.acquire("r", PROMPT) as lease:
            await lease.wait_ready()
            await lease.commit(lease.num_tokens)
        await cache.wait_idle()
        with pytest.raises(StoreUnsupported, match="nothing was cleared"):
            await cache.clear(storage=True)
        async with await cache.acquire("r", PROMPT) as lease:
            assert lease.hits.device == 4


async def test_prefetch_is_refused():
    async with kvactors.open(config()) as cache:
        with pytest.raises(StoreUnsupported, match="no prefetch"):
            await cache.prefetch(PROMPT)


async def test_fastdeploys_flush_only_settings_feed_the_index(monkeypatch):
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    async with kvactors.open(config()) as cache:
        await serve(cache)
        async with await cache.acquire("r", PROMPT) as lease:
            await lease.wait_ready()
            await lease.commit(lease.num_tokens)
        await cache.wait_flushed()
        assert len(stand_in.service().resident) == 4
        assert not stand_in.service().objects
