"""Salts, adapters and media in KV events: against vLLM's rule, Dynamo's and llm-d's, and from the
public call to a reader."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import xxhash
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

import kvactors
from kvactors.errors import ConfigError, SinkError
from kvactors.flush_notifier.messages import BlocksAdded, FlushTask
from kvactors.flush_notifier.sinks.jsonl import JsonLinesSink
from kvactors.flush_notifier.sinks.kv_wire import (
    EMPTY,
    KvEventEncoder,
    identifier,
    identity_fields,
    mm_hash,
)
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.identity import RequestScope, block_extras
from kvactors.settings import Config
from kvactors.settings.sinks import JsonLinesSinkConfig, KvEventsSinkConfig, MemorySinkConfig
from kvactors.types import Reason, Residency, Tier
from tests.support.kv_events import decode_batch

pytestmark = pytest.mark.full

BLOCK = 4
SALTED = RequestScope(None, "tenant-a")
DIGEST = "0123456789abcdef" * 4
HASHES = (
    st.binary(max_size=4) | st.text(max_size=4) | st.integers(-(2**70), 2**70) | st.just(DIGEST)
)
TEXTS = st.none() | st.text(max_size=3) | st.just("dynamo-cache-salt:tenant")


@st.composite
def layouts(draw: Any) -> tuple[list[tuple[int, int]], list[Any]]:
    """Media items of a prompt of at most 8 blocks: adjacent, longer than a block, several in one,
    ending at borders."""
    positions, end = [], 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 11)), max_size=5)):
        if end + gap + length > 8 * BLOCK:
            break
        positions.append((end + gap, length))
        end += gap + length
    return positions, [draw(HASHES) for _ in positions]


def vllm_keys(
    lora: str | None, salt: str | None, positions: Any, hashes: Any, start: int
) -> list[Any] | None:
    """The extra keys of the block from token `start` on, in the order in which vLLM puts them."""
    overlaps = [
        [identifier(value), offset - start]
        for (offset, length), value in zip(positions, hashes, strict=True)
        if offset < start + BLOCK and start < offset + length
    ]
    keys = [lora] * (lora is not None) + overlaps + [salt] * (salt is not None and not start)
    return keys or None


@given(layouts(), TEXTS, TEXTS, st.integers(0, 7), st.integers(1, 8))
def test_the_fields_of_an_event_follow_vllm_and_dynamo(
    media: Any, lora: str | None, salt: str | None, first: int, count: int
):
    positions, hashes = media
    count = min(count, 8 - first)
    extra_keys = tuple(sorted(block_extras(8, BLOCK, positions, hashes).items()))
    keys, infos, cache_salt = identity_fields(RequestScope(lora, salt), first, count, extra_keys)
    sent_lora, sent_salt = (EMPTY if text == "" else text for text in (lora, salt))
    expected = [
        vllm_keys(sent_lora, sent_salt, positions, hashes, BLOCK * block)
        for block in range(first, first + count)
    ]
    assert keys == (expected if any(expected) else None)
    assert cache_salt == (
        None if salt is None else salt.removeprefix("dynamo-cache-salt:") or EMPTY
    )

    items = [[key[0] for key in block or () if isinstance(key, list)] for block in expected]
    if infos is None:
        assert all(key == [sent_lora] for key in expected if key), (
            "nothing that Dynamo could take for media"
        )
        return
    assert [bool(info) for info in infos] == [bool(block) for block in items]
    for info, names in zip(infos, items, strict=True):
        assert info is None or (
            len(info["mm_objects"]) == len(names)
            and all(o["offsets"] == [] for o in info["mm_objects"])
        )


@given(
    TEXTS.filter(lambda salt: salt is not None),
    st.integers(0, 3),
    st.none() | st.text(min_size=1, max_size=3),
)
def test_an_array_for_dynamo_has_the_salt_on_every_event(salt: str, first: int, lora: str | None):
    keys, infos, _ = identity_fields(RequestScope(lora, salt), first, 2, (), tagged=True)
    bare = (salt or EMPTY).removeprefix("dynamo-cache-salt:")
    adapter = [] if lora is None else [lora]
    assert keys == [[*adapter, "dynamo-cache-salt:" + bare], adapter or None]
    assert infos == [None, None]


@pytest.mark.parametrize(
    ("value", "name", "number"),
    [
        (DIGEST, DIGEST, 0x0123456789ABCDEF),
        (bytes.fromhex(DIGEST), DIGEST, 0x0123456789ABCDEF),
        (DIGEST.upper(), DIGEST.upper(), 0x0123456789ABCDEF),
        ("image-0", "image-0", xxhash.xxh3_64_intdigest(b"image-0")),
        ("g" * 64, "g" * 64, xxhash.xxh3_64_intdigest(b"g" * 64)),
        ("0x" + "1" * 62, "0x" + "1" * 62, xxhash.xxh3_64_intdigest(b"0x" + b"1" * 62)),
        ("1_" * 32, "1_" * 32, xxhash.xxh3_64_intdigest(b"1_" * 32)),
        (
            DIGEST[:-1] + "٣",
            DIGEST[:-1] + "٣",
            xxhash.xxh3_64_intdigest((DIGEST[:-1] + "٣").encode()),
        ),
        ("", "", xxhash.xxh3_64_intdigest(b"")),
        (b"\xff", "ff", xxhash.xxh3_64_intdigest(b"ff")),
        (7, "7", 7),
        (2**64 - 1, str(2**64 - 1), 2**64 - 1),
        (2**64, str(2**64), xxhash.xxh3_64_intdigest(str(2**64).encode())),
        (-1, "-1", xxhash.xxh3_64_intdigest(b"-1")),
    ],
)
def test_a_media_item_has_the_names_that_routers_compute(value: Any, name: str, number: int):
    assert (identifier(value), mm_hash(value)) == (name, number)


# -- typed readers, as they declare their events


class VllmStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """The fields of vLLM 0.32."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class SglangStored(msgspec.Struct, omit_defaults=True, tag="BlockStored"):
    """The fields of SGLang 0.5.23."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class OldStored(VllmStored, array_like=True, omit_defaults=True, tag="BlockStored"):
    """vLLM's fields as an array."""


def decoded(payload: bytes, kind: Any) -> list[Any]:
    return msgspec.msgpack.decode(payload, type=tuple[float, list[kind], int])[1]


# -- from the public call to readers of each kind

PROMPTS: list[dict[str, Any]] = [
    {},
    {"salt": "tenant-a"},
    {"salt": "tenant-b"},
    {"salt": ""},
    {"lora": "sql", "lora_id": 3},
    {"lora": "sql-2", "lora_id": 0, "salt": "tenant-a"},
    {"extra_keys": [(0, 4, "image-0")]},
    {"extra_keys": [(3, 10, DIGEST)]},  # begins before and ends after blocks 1 and 2
    {"extra_keys": [(4, 2, "image-0"), (6, 2, b"\x01")], "salt": "tenant-a"},
    {"extra_keys": [(4, 2, "image-0"), (7, 1, 5)]},
    {
        "extra_keys": [(5, 2, "image-0"), (7, 1, 5)]
    },  # the same two, the first at another place of the block
]
SHARED = 3
"""Blocks above a first item that an earlier prompt has made."""
TOKENS = list(range(16, 33))


def config(**events: Any) -> Config:
    return Config.from_mapping(
        {
            "cache": {"block_size": BLOCK, "model": "model-7b"},
            "device": {"num_blocks": 128},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8},
            "host": {"slots": 64},
            "flush": {"sinks": [{"kind": "kv_events", **events}]},
        }
    )


async def finish_all(cache: Any) -> list[tuple[dict[str, Any], bytes]]:
    """Finish every prompt once. Returns the identity and the block hashes of each."""
    made = []
    for number, identity in enumerate(PROMPTS):
        async with await cache.acquire(f"request {number}", TOKENS, **identity) as lease:
            first = min((offset for offset, *_ in identity.get("extra_keys", ())), default=0)
            assert lease.cached_tokens <= first, (
                f"{identity} shares no media and no scope with the prompts before"
            )
            await lease.finish(computed_tokens=len(TOKENS))
            made.append((identity, lease._path.hashes(0, 4)))
    await cache.wait_flushed()
    return made


async def received(reader: Any, sink: Any, first: int = 0) -> list[bytes]:
    frames = [await reader.recv_multipart() for _ in range(first, sink.events.sequence)]
    return [payload for _, _, payload in frames]


@pytest.mark.parametrize(
    "options",
    [{}, {"maps_for": "vllm"}, {"dialect": "array"}, {"dialect": "array", "arrays_for": "dynamo"}],
    ids=["map", "map for vllm", "array", "dynamo"],
)
@pytest.mark.parametrize("max_blocks", [1, 256])
async def test_every_reader_gets_the_whole_identity(tmp_path, options, max_blocks):
    """Each block of each prompt, by the rules of its readers, and again after a restart of the
    notifier and in a snapshot."""
    events = {"endpoint": f"ipc://{tmp_path}/e", "max_blocks": max_blocks, **options}
    async with kvactors.open(config(**events)) as cache:
        [sink] = cache.sinks.values()
        context = zmq.asyncio.Context.instance()
        with context.socket(zmq.SUB) as reader:
            reader.subscribe(b"")
            reader.connect(sink.endpoint)
            await subscribed(sink, reader)
            before = sink.events.sequence
            made = await finish_all(cache)
            check_identities(made, await received(reader, sink, before), options)
            before = sink.events.sequence
            await restart_notifier(cache)
            check_identities(made, await received(reader, sink, before), options)
            encoder = KvEventEncoder(sink.config, BLOCK)
            held = [
                encoder.batch(0.0, [encoder.held(one, Tier(one.tiers))])
                for one in sink.events.sources[None]()
                if one.tiers
            ]
            check_identities(made, held, options)


async def subscribed(sink: Any, reader: Any) -> None:
    """Publish the start of an epoch until the reader gets one: a subscription takes a moment to
    arrive."""
    for _ in range(500):
        await sink.begin_epoch(1)
        if await reader.poll(20):
            break
    else:
        raise AssertionError("no message on this topic")
    while await reader.poll(20):
        await reader.recv_multipart()


async def restart_notifier(cache: Any) -> None:
    """A failure of the notifier: the next incarnation learns every path from the index."""
    incarnation = cache.system.notifier.incarnation
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache.system.notifier_actor.ledger, "gain", None)
        await cache.system.notifier.tell(BlocksAdded(bytes(32), Tier.HOST, Reason.LOAD))
        while cache.system.notifier.incarnation == incarnation:
            await asyncio.sleep(0.01)
    await cache.wait_flushed()


async def stored(cache: Any, sink: Any) -> dict[int, dict[str, Any]]:
    """By hash, the fields of every block that the sink has published, one event a block."""
    await cache.wait_flushed()
    found = {}
    for _, payload in sink.events.window.since(0):
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                [number] = event["block_hashes"]
                found[number] = event
    return found


def numbers(lease: Any, count: int) -> list[int]:
    keys = lease._path.hashes(0, count)
    return [int.from_bytes(keys[i + 24 : i + 32], "big") for i in range(0, len(keys), 32)]


async def test_media_of_a_prompt_that_grows_stay_with_their_blocks(tmp_path):
    events = {"endpoint": f"ipc://{tmp_path}/e", "max_blocks": 1}
    async with kvactors.open(config(**events)) as cache:
        [sink] = cache.sinks.values()
        async with await cache.acquire(
            "a", TOKENS, extra_keys=[(3, 2, "cat"), (13, 3, "dog")]
        ) as lease:
            for computed in (4, 8, 15, 17):
                await lease.commit(computed)
            await lease.extend([1, 2, 3])
            await lease.finish(computed_tokens=20)
            blocks = numbers(lease, 5)
        found = await stored(cache, sink)
    keys = [found[block].get("extra_keys") for block in blocks]
    assert keys == [[[["cat", 3]]], [[["cat", -1]]], None, [[["dog", 1]]], None]


async def test_blocks_whose_scope_was_forgotten_are_not_announced_as_others(tmp_path, monkeypatch):
    monkeypatch.setattr("kvactors.prefix_index.reports.REMEMBERED_SCOPES", 2)
    events = {"endpoint": f"ipc://{tmp_path}/e", "max_blocks": 1}
    async with kvactors.open(config(**events)) as cache:
        [sink] = cache.sinks.values()
        tenants = {}
        for tenant in ("a", "b", "a", "c"):  # of three tenants the least recently used is forgotten
            async with await cache.acquire(tenant, TOKENS, salt=tenant) as lease:
                await lease.finish(computed_tokens=len(TOKENS))
                tenants |= dict.fromkeys(numbers(lease, 4), tenant)
        await cache.wait_flushed()
        before = sink.events.sequence
        await restart_notifier(cache)
        again = {
            number: event["cache_salt"] for number, event in (await stored(cache, sink)).items()
        }
        assert again == tenants, "before the restart each under its own tenant"
        salts = [
            msgspec.msgpack.decode(payload)[1][0].get("cache_salt")
            for _, payload in sink.events.window.since(before)
        ]
        assert sorted(filter(None, salts)) == ["a"] * 4 + ["c"] * 4


async def test_a_number_stays_until_another_is_given(tmp_path):
    events = {"endpoint": f"ipc://{tmp_path}/e", "max_blocks": 1}
    async with kvactors.open(config(**events)) as cache:
        [sink] = cache.sinks.values()
        for first, number in ((100, 7), (200, None), (300, 8)):
            tokens = list(range(first, first + 5))
            await cache.prefetch(tokens, lora="sql")
            async with await cache.acquire("a", tokens, lora="sql", lora_id=number) as lease:
                await lease.finish(computed_tokens=5)
        found = await stored(cache, sink)
    assert sorted((event["token_ids"][0], event["lora_id"]) for event in found.values()) == [
        (100, 7),
        (200, 7),
        (300, 8),
    ]


def check_identities(
    made: list[tuple[dict[str, Any], bytes]], payloads: list[bytes], options: dict[str, Any]
) -> None:
    """Every block of every prompt was stored once, with its identity."""
    wanted = {}
    for identity, keys in made:
        for block in range(4):
            wanted[int.from_bytes(keys[32 * block + 24 : 32 * block + 32], "big")] = (
                identity,
                block,
            )
    assert len(wanted) == 4 * len(PROMPTS) - SHARED, "different identities, different hashes"
    seen: dict[int, Any] = {}
    for payload in payloads:
        for event in msgspec.msgpack.decode(payload)[1]:
            fields = event if isinstance(event, dict) else dict(zip(NAMES, event, strict=False))
            if fields["type"] == "BlockStored":
                typed_readers_decode(payload, options)
                for i, number in enumerate(fields["block_hashes"]):
                    assert number not in seen
                    seen[number] = True
                    check_block(fields, i, *wanted[number], options)
    assert seen.keys() == wanted.keys()


NAMES = [
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "block_mm_infos",
]


VLLM_FIELDS = {"type", *VllmStored.__struct_fields__}


def check_block(
    fields: dict[str, Any], i: int, identity: dict[str, Any], block: int, options: dict[str, Any]
) -> None:
    media = identity.get("extra_keys", [])
    salt = EMPTY if identity.get("salt") == "" else identity.get("salt")
    assert (fields["lora_name"], fields["lora_id"]) == (
        identity.get("lora"),
        identity.get("lora_id"),
    )
    keys = (fields.get("extra_keys") or [None] * 9)[i]
    positions, hashes = (
        [(offset, length) for offset, length, _ in media],
        [value for *_, value in media],
    )
    expected = vllm_keys(identity.get("lora"), salt, positions, hashes, BLOCK * block)
    if options.get("arrays_for") == "dynamo":
        tag = [] if salt is None or i else [f"dynamo-cache-salt:{salt}"]
        expected = [*(key for key in expected or () if key != salt), *tag] or None
    assert keys == expected
    if options.get("maps_for") == "vllm":
        assert fields.keys() <= VLLM_FIELDS
    elif options.get("dialect") == "array":
        assert len(fields) == (10 if options.get("arrays_for") == "dynamo" else 9)
    else:
        assert fields.get("cache_salt") == salt
    items = [key[0] for key in expected or () if isinstance(key, list)]
    if options not in ({"dialect": "array"}, {"maps_for": "vllm"}):
        info = (fields.get("block_mm_infos") or [None] * 9)[i]
        numbers = [mm_hash(value) for value in hashes if identifier(value) in items]
        assert [one["mm_hash"] for one in (info or {"mm_objects": []})["mm_objects"]] == numbers


def typed_readers_decode(payload: bytes, options: dict[str, Any]) -> None:
    if options.get("dialect") != "array":
        decoded(payload, VllmStored)
        decoded(payload, SglangStored)
        decode_batch(payload)
    else:
        decode_batch(payload, "array")
    if options == {"dialect": "array"}:
        decoded(payload, OldStored)


# -- other sinks


async def test_a_json_line_has_the_identity(tmp_path):
    sink = JsonLinesSink(JsonLinesSinkConfig(path=str(tmp_path / "flush.jsonl")), BLOCK)
    async with kvactors.open(
        msgspec.structs.replace(config(), flush=kvactors.Config().flush), sinks=[sink]
    ) as cache:
        await finish_all(cache)
    found = []
    for line in (tmp_path / "flush.jsonl").read_bytes().splitlines():
        record = msgspec.json.decode(line)
        if record["type"] == "flush" and record["residency"] == "resident":
            found.append(
                {
                    name: record[name]
                    for name in ("lora", "lora_id", "salt", "media")
                    if name in record
                }
            )
    assert {"lora": "sql-2", "lora_id": 0, "salt": "tenant-a"} in found
    assert {"salt": ""} in found
    assert {
        "media": [[0, [[DIGEST, 3]]], [1, [[DIGEST, -1]]], [2, [[DIGEST, -5]]], [3, [[DIGEST, -9]]]]
    } in found
    assert {"salt": "tenant-a", "media": [[1, [["image-0", 0], ["01", 2]]]]} in found


@pytest.mark.parametrize(
    ("scope", "extra_keys"),
    [
        (RequestScope(None, "tenant-b"), ()),
        (RequestScope("sql", "tenant-a"), ()),
        (SALTED, ((0, b"image"),)),
    ],
)
async def test_the_memory_sink_refuses_a_block_under_another_identity(scope, extra_keys):
    sink = MemorySink(MemorySinkConfig(), BLOCK)
    await sink.begin_epoch(1)
    task = FlushTask(
        bytes(4 * BLOCK),
        0,
        1,
        b"k" * 32,
        bytes(32),
        Residency.RESIDENT,
        Tier.DEVICE,
        Reason.COMMIT,
        1,
        SALTED,
    )
    await sink.deliver([task])
    await sink.deliver(
        [msgspec.structs.replace(task, tier=Tier.HOST, scope=SALTED._replace(lora_id=5))]
    )
    with pytest.raises(SinkError, match="another path"):
        await sink.deliver(
            [msgspec.structs.replace(task, tier=Tier.HOST, scope=scope, extra_keys=extra_keys)]
        )


# -- settings


def test_topics_name_the_model_the_machine_and_the_rank(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "pod-{3}")
    settings = KvEventsSinkConfig(topic="kv@{host}@{model}.{{x}}.{dp_rank}", dp_rank=2)
    settings.check()
    assert settings.for_model("org/model-7b{}").topic == "kv@pod-{3}@org/model-7b{}.{x}.2"


async def test_events_are_published_on_the_topic_of_the_model(tmp_path):
    async with kvactors.open(
        config(endpoint=f"ipc://{tmp_path}/e", topic="kv@node-1@{model}")
    ) as cache:
        [sink] = cache.sinks.values()
        with zmq.asyncio.Context.instance().socket(zmq.SUB) as reader:
            reader.subscribe(b"kv@node-1@model-7b")
            reader.connect(sink.endpoint)
            await subscribed(sink, reader)
            await sink.begin_epoch(1)
            assert (await reader.recv_multipart())[0] == b"kv@node-1@model-7b"


@pytest.mark.parametrize(
    "topic", ["{", "}", "kv@{pod}", "{}", "{0}", "{model!r}", "{model:>5}", "{model.upper}"]
)
def test_a_topic_with_an_unknown_field_is_refused(topic):
    with pytest.raises(ConfigError, match="topic"):
        KvEventsSinkConfig(topic=topic).check()


def test_each_form_has_its_own_setting_for_readers():
    with pytest.raises(ConfigError, match="arrays_for"):
        KvEventsSinkConfig(arrays_for="dynamo").check()
    with pytest.raises(ConfigError, match="maps_for"):
        KvEventsSinkConfig(dialect="array", maps_for="vllm").check()


async def test_a_number_needs_an_adapter():
    async with kvactors.open(
        msgspec.structs.replace(config(), flush=kvactors.Config().flush)
    ) as cache:
        with pytest.raises(ValueError, match="lora_id"):
            await cache.acquire("a", TOKENS, lora_id=1)
        with pytest.raises(TypeError, match="lora_id"):
            await cache.acquire("a", TOKENS, lora="sql", lora_id="1")
        with pytest.raises(ValueError, match="lora_id"):
            await cache.acquire("a", TOKENS, lora="sql", lora_id=-1)
