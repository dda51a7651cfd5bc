"""KV events: bytes as documented, and readers of every kind, over real sockets."""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

import kvactors
from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.kv_events import KvEventsSink, Window
from kvactors.flush_notifier.sinks.kv_wire import END, KvEventEncoder
from kvactors.identity import PLAIN, RequestScope, media_extra
from kvactors.settings import Config
from kvactors.settings.sinks import Endpoint, KvEventsSinkConfig, of_rank
from kvactors.types import Reason, Residency, Tier
from tests.support.kv_events import decode_batch
from tests.support.mirror import Mirror, Reader

pytestmark = pytest.mark.full

BLOCK = 4
DOC = (Path(__file__).parents[2] / "docs" / "kv_events.md").read_text("utf-8")
GOLDEN = dict(re.findall(r"^\* `([a-z_]+)`, [^`]*: `([0-9a-f]+)`$", DOC, re.MULTILINE))
KEYS = [bytes(24) + bytes([0x80 + i, 0, 0, 0, 0, 0, 0, i]) for i in range(8)]
ROOT = bytes([9]) * 32
TOKENS = np.arange(100, 100 + 8 * BLOCK, dtype="<u4").tobytes()


def hash_of(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def task(
    start=0,
    count=2,
    residency=Residency.RESIDENT,
    tier=Tier.DEVICE,
    reason=Reason.COMMIT,
    scope=PLAIN,
    media=None,
) -> FlushTask:
    """The task in the form for a sink that identifies blocks by name."""
    own = (
        TOKENS[4 * BLOCK * start : 4 * BLOCK * (start + count)]
        if residency is Residency.RESIDENT
        else b""
    )
    parent = KEYS[start - 1] if start else ROOT
    extra_keys = tuple((at, media_extra(items)) for at, items in (media or {}).items())
    names = b"".join(KEYS[start : start + count])
    return FlushTask(
        own, start, count, names, parent, residency, tier, reason, 7, scope, extra_keys
    )


def gone(start=0, count=2, tier=Tier.DEVICE, reason=Reason.CPU_EVICTION) -> FlushTask:
    return task(start, count, Residency.GONE, tier, reason)


CLEAR = FlushTask(b"", 0, 0, b"", b"", Residency.GONE, Tier(7), Reason.CLEAR, 7)


# -- bytes

MEDIA = {
    0: [("0123456789abcdef" * 4, 2)],
    1: [("0123456789abcdef" * 4, -2), (b"\xff\x01", 1), (7, 3)],
}
CASES = {
    "stored": ([task(0, 2)], {}),
    "stored_below": ([task(1, 1, tier=Tier.HOST)], {}),
    "removed": ([gone(0, 2, Tier.STORAGE)], {}),
    "cleared": ([CLEAR], {}),
    "several": ([gone(2, 1), task(2, 1, tier=Tier.HOST)], {"dp_rank": 3}),
    "stored_array": ([task(0, 2)], {"dialect": "array"}),
    "removed_array": ([gone(0, 1, Tier.HOST)], {"dialect": "array"}),
    "cleared_array": ([CLEAR], {"dialect": "array"}),
    "stored_bytes": ([task(1, 1)], {"hashes": "bytes"}),
    "stored_sglang": (
        [task(0, 1, tier=Tier.HOST), task(0, 1, tier=Tier.STORAGE)],
        {"media": "sglang"},
    ),
    "stored_lora_salt": ([task(0, 2, scope=RequestScope("adapter", "tenant-a", 3))], {}),
    "stored_salt_below": ([task(1, 1, scope=RequestScope(None, "tenant-a"))], {}),
    "stored_media": ([task(0, 2, scope=RequestScope(None, "tenant-a"), media=MEDIA)], {}),
    "stored_media_vllm": (
        [task(0, 2, scope=RequestScope(None, "tenant-a"), media=MEDIA)],
        {"maps_for": "vllm"},
    ),
    "stored_media_array": (
        [task(0, 2, scope=RequestScope(None, "tenant-a"), media=MEDIA)],
        {"dialect": "array"},
    ),
    "stored_media_dynamo": (
        [task(1, 1, scope=RequestScope(None, "tenant-a"), media=MEDIA)],
        {"dialect": "array", "arrays_for": "dynamo"},
    ),
}


def payload(name: str) -> bytes:
    tasks, options = CASES[name]
    config = KvEventsSinkConfig(**options)
    encoder = KvEventEncoder(config, BLOCK)
    return encoder.batch(1.5, [encoder.event(task) for task in tasks])


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_as_documented(name):
    assert payload(name).hex() == GOLDEN[name]


def test_every_documented_payload_is_made():
    assert set(GOLDEN) == set(CASES)


# -- sockets


@asynccontextmanager
async def opened(tmp_path, **options):
    ends = {"endpoint": f"ipc://{tmp_path}/e", "replay_endpoint": f"ipc://{tmp_path}/r"}
    options = {**ends, "numbers": "from_zero", "heartbeat_s": 0.0, **options}
    sink = KvEventsSink(KvEventsSinkConfig(**options), BLOCK)
    await sink.open()
    try:
        yield sink
    finally:
        await sink.close()


@asynccontextmanager
async def socket(kind: int, endpoint: str, topic: str = ""):
    one: Any = zmq.asyncio.Context.instance().socket(kind)
    one.setsockopt(zmq.LINGER, 0)
    if kind == zmq.SUB:
        one.setsockopt_string(zmq.SUBSCRIBE, topic)
    connected = one.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    one.connect(endpoint)
    assert await connected.poll(20_000), f"nobody answers at {endpoint}"
    one.disable_monitor()
    connected.close()
    if kind == zmq.SUB:
        await asyncio.sleep(0.15)  # the publisher takes the subscription in another thread
    try:
        yield one
    finally:
        one.close()


async def receive(one: Any, seconds: float = 20.0) -> list[bytes]:
    assert await one.poll(int(1000 * seconds)), "nothing came"
    frames: list[bytes] = await one.recv_multipart()
    return frames


async def answers(one: Any) -> list[list[bytes]]:
    """A whole answer, end marker included."""
    got = []
    while True:
        got.append(await receive(one))
        if END.to_bytes(8, "big") in got[-1]:
            return got


def number(frame: bytes) -> int:
    return int.from_bytes(frame, "big")


async def test_live_messages_are_three_frames_numbered_from_0(tmp_path):
    async with (
        opened(tmp_path, topic="kv@pod@model") as sink,
        socket(zmq.SUB, sink.endpoint) as reader,
    ):
        await sink.begin_epoch(7)
        await sink.deliver([task(0, 2)])
        await sink.deliver([gone(1, 1)])
        await sink.begin_epoch(8)
        got = [await receive(reader) for _ in range(4)]
        assert [(topic, number(n), len(n)) for topic, n, _ in got] == [
            (b"kv@pod@model", i, 8) for i in range(4)
        ]
        kinds = [msgspec.msgpack.decode(p)[1][0]["type"] for _, _, p in got]
        assert kinds == ["AllBlocksCleared", "BlockStored", "BlockRemoved", "AllBlocksCleared"], (
            "a life begins with nothing"
        )


@pytest.mark.parametrize("form", ["five_frames", "four_frames"])
async def test_replay_by_a_dealer(tmp_path, form):
    async with (
        opened(tmp_path, replay=form, topic="t") as sink,
        socket(zmq.DEALER, sink.replay_endpoint) as dealer,
    ):
        await sink.begin_epoch(7)
        for start in range(6):
            await sink.deliver([task(start, 1)])
        await dealer.send_multipart([b"", (3).to_bytes(8, "big")])
        *got, end = await answers(dealer)
        assert [number(frames[-2]) for frames in got] == [3, 4, 5, 6]
        head = [b"", b"t"] if form == "five_frames" else [b""]
        assert all(frames[:-2] == head for frames in got)
        assert end == ([b"", b""] if form == "five_frames" else [b""]) + [b"\xff" * 8, b""]
        events = [decode_batch(frames[-1])[1][0] for frames in got]
        assert [event.block_hashes for event in events] == [
            [hash_of(KEYS[i])] for i in (2, 3, 4, 5)
        ]
        await dealer.send_multipart([b"", (100).to_bytes(8, "big")])
        assert len(await answers(dealer)) == 1, "nothing but the marker"


def test_a_window_is_bounded_by_batches_and_by_bytes():
    window = Window(100, 50)
    for i in range(20):
        window.add(i, bytes(10))
    assert [n for n, _ in window.since(0)] == [15, 16, 17, 18, 19]
    assert window.held == 50
    window.add(20, bytes(1000))
    assert [n for n, _ in window.since(0)] == [20], "one is always kept"
    assert window.since(21) == []
    assert Window(3, 10).since(0) == []


@pytest.mark.parametrize(
    "request_", [[b"", b"short"], [b"x", bytes(8)], [b""], [b"", bytes(8), b"more"]]
)
async def test_malformed_requests_are_counted_and_others_served(tmp_path, request_):
    async with opened(tmp_path) as sink, socket(zmq.DEALER, sink.replay_endpoint) as dealer:
        await sink.begin_epoch(7)
        await dealer.send_multipart(request_)
        await dealer.send_multipart([b"", bytes(8)])
        assert len(await answers(dealer)) == 2
        assert (sink.server.malformed, sink.server.requests) == (1, 1)


# -- a whole cache

CACHE = {
    "cache": {"block_size": BLOCK},
    "device": {"num_blocks": 16},
    "host": {"slots": 12, "transit_slots": 16},
    "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2},
    "storage": {"backend": "memory", "write_policy": "write_back", "capacity_blocks": 20},
}


def config(tmp_path, **options) -> Config:
    sink = {
        "kind": "kv_events",
        "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
        **options,
    }
    return Config.from_mapping({**CACHE, "flush": {"sinks": [sink]}})


async def churn(cache, seeds) -> None:
    for seed in seeds:
        async with await cache.acquire(
            f"r{seed}", [seed % 3] * BLOCK + [seed] * 3 * BLOCK
        ) as lease:
            await lease.wait_ready()
            await lease.commit(4 * BLOCK)


def tiers_of(cache) -> dict[str, set[int]]:
    from tests.support.announced import announceable

    names = {Tier.DEVICE: "GPU", Tier.HOST: "CPU", Tier.STORAGE: "STORAGE"}
    held = {
        names[tier]: {hash_of(key) for key in keys}
        for tier, keys in announceable(cache.system).items()
    }
    return {medium: hashes for medium, hashes in held.items() if hashes}


@pytest.mark.parametrize(("lose", "window"), [(0.0, 10_000), (0.3, 10_000), (0.3, 2)])
async def test_a_reader_that_loses_messages_ends_equal_to_the_tiers(tmp_path, lose, window):
    """With a window of two batches it is sent states in the middle of the work."""
    async with kvactors.open(config(tmp_path, replay_window=window)) as cache:
        sink: Any = cache.sinks["kv_events"]
        reader = Reader(sink.endpoint, sink.replay_endpoint, lose=lose, seed=4)
        while not reader.statistics.connections:  # only live messages are lost
            await asyncio.to_thread(reader.step, 0.01)
        work = asyncio.create_task(churn(cache, range(60)))
        for _ in range(200):
            await asyncio.to_thread(reader.step, 0.01)
            if work.done():
                break
        await work
        await cache.wait_flushed(10.0)
        assert await asyncio.to_thread(reader.reach, sink.events.sequence, 20.0)
        assert {m: h for m, h in reader.mirror.view.items() if h} == tiers_of(cache)
        assert reader.statistics.dropped >= 3 or not lose
        assert len(tiers_of(cache)) == 3
        reader.close()


async def test_a_full_clear_is_one_event_and_a_clear_of_two_tiers_is_sent_by_tier(tmp_path):
    async with kvactors.open(config(tmp_path)) as cache:
        sink: Any = cache.sinks["kv_events"]
        await churn(cache, range(12))
        await cache.wait_flushed(10.0)
        assert len(tiers_of(cache)) == 3

        start = sink.events.sequence
        await cache.clear()
        await cache.wait_flushed(10.0)
        events = [event for _, p in sink.events.window.since(start) for event in decode_batch(p)[1]]
        assert {type(event).__name__ for event in events} == {"BlockRemoved"}
        assert {"GPU", "CPU"} <= {event.medium for event in events}, (
            "and blocks in storage below blocks that were not there"
        )
        await churn(cache, range(3))
        await cache.wait_flushed(10.0)
        start = sink.events.sequence
        await cache.clear(storage=True)
        await cache.wait_flushed(10.0)
        events = [event for _, p in sink.events.window.since(0) for event in decode_batch(p)[1]]
        mirror = Mirror()
        mirror.apply(events)
        assert not any(mirror.view.values())
        assert tiers_of(cache) == {}


async def test_a_slow_subscriber_never_slows_the_publisher(tmp_path):
    async with (
        opened(tmp_path, high_water_mark=50, replay_window=100) as sink,
        socket(zmq.SUB, sink.endpoint),
    ):
        began = asyncio.get_running_loop().time()
        for i in range(20_000):
            await sink.deliver([task(i % 8, 1)])
        assert sink.events.sequence == 20_000
        assert asyncio.get_running_loop().time() - began < 10.0, "it does not wait"


# -- impossible settings


@pytest.mark.parametrize(
    "endpoint", ["tcp://nope", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "ipc:///no/such/folder/e"]
)
async def test_an_endpoint_that_cannot_be_had_is_named(endpoint):
    with pytest.raises(SinkError, match=re.escape(endpoint)):
        await KvEventsSink(KvEventsSinkConfig(endpoint=endpoint, bind="bind"), BLOCK).open()


async def test_a_port_that_is_taken_is_an_error_at_start_and_nothing_is_half_started(tmp_path):
    async with opened(tmp_path, endpoint="tcp://127.0.0.1:0") as first:
        table = {
            "kind": "kv_events",
            "endpoint": f"ipc://{tmp_path}/free",
            "replay_endpoint": first.endpoint,
        }
        with pytest.raises(SinkError, match="Address already in use"):
            async with kvactors.open(Config.from_mapping({**CACHE, "flush": {"sinks": [table]}})):
                pass
    async with kvactors.open(Config.from_mapping({**CACHE, "flush": {"sinks": [table]}})) as cache:
        await churn(cache, [1])


def test_a_missing_pyzmq_names_its_extra(monkeypatch):
    import importlib
    import sys

    from kvactors.flush_notifier.sinks import kv_sockets

    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(SinkError, match=r"kvactors\[kv-events\]"):
        importlib.reload(kv_sockets)
    monkeypatch.undo()
    importlib.reload(kv_sockets)


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("inproc://events", 2, "inproc://events_dp2"),
        ("ipc:///tmp/e", 1, "ipc:///tmp/e_dp1"),
        ("", 2, ""),
    ],
)
def test_endpoints_of_data_parallel_ranks(endpoint, rank, expected):
    assert of_rank(endpoint, rank) == expected


@pytest.mark.parametrize(
    ("endpoint", "listens"),
    [
        ("tcp://*:1", True),
        ("tcp://[::]:1", True),
        ("tcp://127.0.0.1:1", True),
        ("tcp://router:1", False),
        ("ipc://x", True),
        ("tcp://[::1]:1", True),
        ("tcp://[0:0:0:0:0:0:0:1]:1", True),
        ("tcp://[::ffff:127.0.0.1]:1", True),
        ("tcp://[0::]:1", True),
        ("tcp://[fd00::5]:1", False),
        ("tcp://10.0.0.5:1", False),
        ("tcp://127.1:1", True),
        ("tcp://localhost:1", True),
    ],
)
def test_where_a_publisher_listens_and_where_it_connects(endpoint, listens):
    assert Endpoint.of(endpoint).own is listens
