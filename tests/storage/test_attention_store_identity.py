"""AttentionStore is addressed by tokens alone: what has more to its identity is neither stored in
it nor read from it."""

from __future__ import annotations

import asyncio
import itertools
import random

import numpy as np
import pytest

import kvactors
from kvactors.device.host import HostDevice
from kvactors.errors import StoreUnsupported
from kvactors.settings import Config
from kvactors.storage.attempts import Attempts
from tests.storage.test_attention_store_backend import BLOCK, LAYOUT, STAND_IN, store_over
from tests.support import attentionstore_sdk as stand_in
from tests.support import cache as support
from tests.support.attentionstore_sdk.sdk import AttentionStoreSDK


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


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


async def serve(cache, tokens, *, extend=(), **identity) -> int:
    """Serve one request, verified. Returns the blocks found in storage."""
    lease = await support.serve(cache, "r", tokens, output=extend, **identity)
    await cache.wait_idle()
    await cache.clear()
    return lease.hits.storage


PROMPT = list(range(4 * BLOCK + 1))
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
        assert await serve(cache, PROMPT, **identity) == 0
        assert not stand_in.service().objects, "nothing that tokens alone would name is stored"
        assert await serve(cache, PROMPT) == 0
        assert await serve(cache, PROMPT, **identity) == 0, "the plain request's bytes"
        assert await serve(cache, PROMPT) == 4


async def test_blocks_from_a_medium_on_are_neither_stored_nor_read():
    async with kvactors.open(config()) as cache:
        image = [(2 * BLOCK + 1, 2, "cat.png")]
        assert await serve(cache, PROMPT, extra_keys=image) == 0
        assert len({path for path, _ in stand_in.service().objects}) == 2
        assert await serve(cache, PROMPT, extra_keys=image) == 2
        assert await serve(cache, PROMPT, extra_keys=[(2 * BLOCK + 1, 2, "dog.png")]) == 2
        assert await serve(cache, PROMPT) == 2
        assert await serve(cache, PROMPT) == 4
        assert await serve(cache, PROMPT, extra_keys=image) == 2


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
        assert await serve(cache, PROMPT) == 0
        await cache.set_namespace("weights-2")
        before = len(stand_in.service().calls)
        assert await serve(cache, PROMPT) == 0
        assert await serve(cache, PROMPT) == 0
        assert len(stand_in.service().calls) == before
        await cache.set_namespace("default")
        assert await serve(cache, PROMPT) == 4


async def test_models_and_namespaces_have_their_own_names_at_the_service():
    scopes = [{"model": "a"}, {"model": "b"}, {"model": "a", "namespace": "w2"}]
    for found in (0, 4):
        for scope in scopes:
            async with kvactors.open(config(**scope)) as cache:
                assert await serve(cache, PROMPT) == found
    assert len(stand_in.services) == 3


async def test_names_that_are_set_are_passed_as_they_are():
    table = {"sdk": STAND_IN, "namespace": "ns", "model_version": "v7"}
    async with kvactors.open(config(model="", attention_store=table)) as cache:
        assert cache.config.cache.model == "ns/v7"
        await serve(cache, PROMPT)
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


async def test_requests_of_many_scopes_never_get_bytes_of_another():
    draw = random.Random(7)
    scopes = [
        {},
        {"salt": "a"},
        {"lora": "x"},
        {"extra_keys": [(5, 2, 1)]},
        {"extra_keys": [(5, 2, 2)]},
    ]
    async with kvactors.open(config(device={"num_blocks": 24}, host={"slots": 8})) as cache:
        for _ in range(120):
            if draw.random() < 0.1:
                await cache.set_namespace(draw.choice(["default", "w2"]))
            prompt = [draw.randrange(2)] * BLOCK + list(range(BLOCK * draw.randint(1, 3) + 1))
            await support.serve(cache, "r", prompt, **draw.choice(scopes))
            if draw.random() < 0.3:
                await cache.wait_idle()
                await cache.clear()
        await cache.wait_idle()
        assert cache.check() == []
        assert cache.statistics().store.reads > 20


# -- an SDK that answers wrongly


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


@pytest.mark.parametrize("number", [np.int64(2), np.uint8(2)])
async def test_numbers_of_other_types_are_numbers(number, monkeypatch):
    store = store_over(HostDevice(LAYOUT, 8))
    await store.open()
    for name in ("match", "read", "write"):
        monkeypatch.setattr(AttentionStoreSDK, name, broken(number))
    path = np.arange(2 * BLOCK, dtype="<u4").tobytes()
    assert (await store.save(path, 0, (0, 1), 5.0), await store.fetch(path, 0, (2, 3), 5.0)) == (
        2,
        2,
    )
    await store.close()


@pytest.mark.parametrize("answer", [9, -1, None, "2", 2.0, RuntimeError("x")], ids=repr)
async def test_a_back_end_that_gives_no_count_costs_a_miss_and_no_actor(answer, monkeypatch):
    async with kvactors.open(config()) as cache:
        assert await serve(cache, PROMPT) == 0

        async def fetch(*arguments):
            if isinstance(answer, Exception):
                raise answer
            return answer

        with monkeypatch.context() as patch:
            patch.setattr(cache.system.device_store, "fetch", fetch)
            assert await serve(cache, PROMPT) == 0
        assert await serve(cache, PROMPT) == 4
        assert cache.check() == []


async def test_an_sdk_that_answers_wrongly_costs_no_request_more_than_a_miss(monkeypatch):
    answers = itertools.cycle(WRONG)

    def wild(real):
        def call(self, *arguments, **options):
            return (
                broken(next(answers))(self) if next(turn) % 2 else real(self, *arguments, **options)
            )

        return call

    turn = itertools.count()
    for name in ("match", "read", "write"):
        monkeypatch.setattr(AttentionStoreSDK, name, wild(getattr(AttentionStoreSDK, name)))
    async with kvactors.open(config()) as cache:
        monkeypatch.setattr(Attempts, "allow", lambda _: True)
        monkeypatch.setattr(Attempts, "paused", False)
        for _ in range(40):
            await serve(cache, PROMPT)
        assert cache.check() == []


async def test_fastdeploys_flush_only_settings_feed_the_index(monkeypatch):
    monkeypatch.setenv("FD_AS_ONLY_FLUSH", "1")
    async with kvactors.open(config()) as cache:
        await serve(cache, PROMPT)
        async with await cache.acquire("r", PROMPT) as lease:
            await lease.wait_ready()
            await lease.commit(lease.num_tokens)
        await cache.wait_flushed()
        assert len(stand_in.service().resident) == 4
        assert not stand_in.service().objects
