"""The encoder of KV events against msgspec, byte for byte."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.kv_wire import KvEventEncoder
from kvactors.identity import PLAIN, RequestScope, media_extra
from kvactors.native import EventEncoder
from kvactors.settings.sinks import KvEventsSinkConfig
from kvactors.types import Reason, Residency, Tier
from tests.flush_notifier import kv_reference

KEY = bytes(32)

CONFIGS = st.builds(
    KvEventsSinkConfig,
    dialect=st.sampled_from(["map", "array"]),
    maps_for=st.sampled_from(["all", "vllm"]),
    arrays_for=st.sampled_from(["vllm", "dynamo"]),
    media=st.sampled_from(["vllm", "sglang"]),
    hashes=st.sampled_from(["int", "bytes"]),
    dp_rank=st.sampled_from([0, 1, 127, 128, 70_000]),
)
# around the numbers at which MessagePack's forms change
EDGES = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 150_000, 2**31, 2**32 - 1]
TOKEN = st.sampled_from(EDGES) | st.integers(0, 2**32 - 1)
NUMBER = st.sampled_from([*EDGES, 2**32, 2**63, 2**64 - 1]) | st.integers(0, 2**64 - 1)
TEXT = st.text("a0é-:\0", max_size=70)
NAMES = st.none() | st.sampled_from(["", "a", "dynamo-cache-salt:x", "é" * 200]) | TEXT
MOST_SCOPES = st.just(PLAIN) | st.builds(
    RequestScope, NAMES, NAMES, st.none() | st.integers(-(2**31), 2**31) | NUMBER
)
ITEMS = st.lists(
    st.tuples(st.binary(max_size=40) | TEXT | st.integers(0, 2**70), st.integers(-300, 300)),
    min_size=1,
    max_size=3,
)


@st.composite
def tasks(draw: st.DrawFn, block_size: int) -> FlushTask:
    count = draw(st.sampled_from([0, 1, 2, 15, 16, 17]) | st.integers(1, 40))
    if not count:
        return CLEAR
    last = st.binary(min_size=8, max_size=8) | NUMBER.map(lambda n: n.to_bytes(8, "big"))
    key = st.tuples(st.binary(min_size=24, max_size=24), last).map(b"".join)
    keys = [draw(key) for _ in range(min(count, 3))]
    start = draw(st.integers(0, 5))
    residency = draw(st.sampled_from([Residency.RESIDENT, Residency.GONE]))
    resident = residency is Residency.RESIDENT
    some = draw(st.lists(TOKEN, min_size=1, max_size=20)) if resident else []
    media = draw(st.dictionaries(st.integers(start, start + count), ITEMS, max_size=3))
    return FlushTask(
        np.resize(np.array(some, "<u4"), count * block_size).tobytes() if resident else b"",
        start,
        count,
        b"".join((keys * count)[:count]),
        draw(key),
        residency,
        draw(st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.STORAGE])),
        Reason.COMMIT,
        1,
        draw(MOST_SCOPES),
        tuple((at, media_extra(items)) for at, items in sorted(media.items())) if resident else (),
    )


BATCHES = st.sampled_from([1, 3, 16, 200]).flatmap(
    lambda size: st.tuples(st.just(size), st.lists(tasks(size), max_size=4))
)


FORMS = [
    {"dialect": "map"},
    {"dialect": "map", "maps_for": "vllm"},
    {"dialect": "array"},
    {"dialect": "array", "arrays_for": "dynamo"},
]
SCOPES = [PLAIN, RequestScope("adapter"), RequestScope(None, "salt"), RequestScope("a", "s", 3)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("residency", [Residency.RESIDENT, Residency.GONE])
@pytest.mark.parametrize("start", [0, 3])
def test_every_form_of_every_scope_in_parts(form, scope, residency, start):
    config, keys = KvEventsSinkConfig(**form), b"".join(bytes([i]) * 32 for i in range(1, 6))
    resident = residency is Residency.RESIDENT
    task = FlushTask(
        bytes(range(20 * 4)) if resident else b"",
        start,
        5,
        keys,
        KEY,
        residency,
        Tier.HOST,
        Reason.COMMIT,
        1,
        scope,
    )
    encoder = KvEventEncoder(config, 4)
    for max_blocks in (1, 2, 256):
        ours = [event for event, _ in encoder.events(task, max_blocks)]
        theirs = kv_reference.events(config, 4, task, max_blocks)
        assert encoder.batch(1.5, ours) == kv_reference.batch(1.5, theirs, 0)


@given(CONFIGS, BATCHES, st.integers(1, 50), st.floats())
def test_batches_are_those_of_msgspec(config, batch, max_blocks, timestamp):
    block_size, made = batch
    encoder = KvEventEncoder(config, block_size)
    ours = [event for task in made for event, _ in encoder.events(task, max_blocks)]
    theirs = [
        event
        for task in made
        for event in kv_reference.events(config, block_size, task, max_blocks)
    ]
    encoded = encoder.batch(timestamp, ours)
    assert encoded == kv_reference.batch(timestamp, theirs, config.dp_rank)


@given(CONFIGS, BATCHES, st.integers(1, 50), st.floats(), st.sampled_from([list, tuple]))
def test_batches_of_tasks_are_those_of_msgspec(config, batch, max_blocks, timestamp, kind):
    block_size, made = batch
    config = msgspec.structs.replace(config, max_blocks=max_blocks)
    encoded = KvEventEncoder(config, block_size).batch_of_tasks(timestamp, kind(made))
    if not made or sum(task.count for task in made) > max_blocks:
        assert encoded is None, "no batch, or several"
        return
    theirs = [
        event
        for task in made
        for event in kv_reference.events(config, block_size, task, max_blocks)
    ]
    assert encoded == kv_reference.batch(timestamp, theirs, config.dp_rank)


def test_an_identity_that_cannot_be_encoded_leaves_the_encoder_usable():
    """The encoder calls Python for the task in the middle."""
    encoder = KvEventEncoder(KvEventsSinkConfig(), 1)
    good = FlushTask(bytes(4), 0, 1, KEY, KEY, Residency.RESIDENT, Tier.DEVICE, Reason.COMMIT, 1)
    bad = msgspec.structs.replace(good, extra_keys=((0, b"\xff"),))
    named = msgspec.structs.replace(good, scope=RequestScope("adapter", "salt"))
    expected = encoder.batch(0.5, [encoder.event(task) for task in (good, named, good)])
    for _ in range(3):
        with pytest.raises(ValueError, match="extra key"):
            encoder.batch_of_tasks(0.5, [good, bad, named])
        assert encoder.batch_of_tasks(0.5, [good, named, good]) == expected


@given(CONFIGS, tasks(4))
def test_a_block_of_a_snapshot_is_the_event_of_its_task(config, task):
    if task.residency is Residency.GONE:
        return
    encoder, key = KvEventEncoder(config, 4), task.hashes[:32]
    extra = dict(task.extra_keys).get(task.start_block_idx, b"")
    held = HeldBlock(key, task.parent, task.start_block_idx, task.tokens[:16], 1, task.scope, extra)
    one = FlushTask(
        task.tokens[:16],
        task.start_block_idx,
        1,
        key,
        task.parent,
        Residency.RESIDENT,
        Tier.HOST,
        Reason.COMMIT,
        1,
        task.scope,
        ((task.start_block_idx, extra),) if extra else (),
    )
    assert encoder.held(held, Tier.HOST) == encoder.event(one)


@given(st.integers(0, 70_000))
@example(65_535)
@example(65_536)
def test_heads_of_arrays_of_any_length(count):
    config = KvEventsSinkConfig()
    task = FlushTask(
        bytes(4 * count),
        0,
        1,
        bytes(32),
        bytes(32),
        Residency.RESIDENT,
        Tier.DEVICE,
        Reason.COMMIT,
        1,
    )
    encoder = KvEventEncoder(config, count)
    expected = kv_reference.events(config, count, task, 1)
    assert encoder.batch(0.5, [encoder.event(task)]) == kv_reference.batch(0.5, expected, 0)
    removed = FlushTask(
        b"", 0, count, bytes(32 * count), bytes(32), Residency.GONE, Tier.DEVICE, Reason.COMMIT, 1
    )
    if count:
        expected = kv_reference.events(config, 1, removed, count)
        assert encoder.batch(0.5, [encoder.event(removed)]) == kv_reference.batch(0.5, expected, 0)
    many = [encoder.cleared] * count
    assert encoder.batch(0.5, many) == kv_reference.batch(
        0.5, [{"type": "AllBlocksCleared"}] * count, 0
    )


def native(**changes) -> EventEncoder:
    options = {
        "array": False,
        "whole_hashes": False,
        "block_size": 4,
        "media": ["GPU", "CPU", "STORAGE"],
        "num_nil": 0,
        "dp_rank": b"\0",
        "resident": Residency.RESIDENT,
        "plain": PLAIN,
    }
    return EventEncoder(**{**options, **changes})


CLEAR = FlushTask(b"", 0, 0, b"", b"", Residency.GONE, Tier(7), Reason.CLEAR, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.stored(KEY[1:], KEY, b"", 1),
        lambda e: e.stored(KEY, KEY[1:], b"", 1),
        lambda e: e.stored(KEY, KEY + KEY, b"", 1),
        lambda e: e.stored(KEY, KEY, b"abc", 1),
        lambda e: e.stored(KEY, KEY, b"", 0),
        lambda e: e.stored(KEY, KEY, b"", 3),
        lambda e: e.stored(KEY, KEY, b"", 8),
        lambda e: e.stored(KEY, KEY, b"", -1),
        lambda e: e.removed(KEY[1:], 1),
        lambda e: e.removed(KEY, 5),
        lambda e: e.stored_with(KEY, KEY, b"", 1, b"", b"", 8, b""),
        lambda e: e.stored_with(KEY, KEY, b"", 1, b"", b"", -1, b""),
        lambda e: native(num_nil=8),
        lambda e: native(num_nil=-1),
        lambda e: native(block_size=-1),
        lambda e: native(media=["x" * 256]),
    ],
)
def test_arguments_of_other_lengths_are_refused(call):
    with pytest.raises(ValueError, match=r"must be|out of range|too long"):
        call(native())


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.stored("text", KEY, b"", 1),
        lambda e: e.stored(KEY, None, b"", 1),
        lambda e: e.stored(KEY, KEY, bytearray(4), 1),
        lambda e: e.stored(KEY, KEY, b"", "GPU"),
        lambda e: e.removed(None, 1),
        lambda e: e.batch("now", []),
        lambda e: e.batch(0.5, (b"",)),
        lambda e: e.batch(0.5, ["text"]),
        lambda e: e.batch_of_tasks(0.5, 1, 10, bytes),
        lambda e: e.batch_of_tasks(0.5, [CLEAR], 10, lambda task: "text"),
    ],
)
def test_arguments_of_other_types_are_refused(call):
    with pytest.raises((TypeError, RuntimeError)):
        call(native())


def test_a_large_event_leaves_no_large_buffer():
    encoder = native()
    large = encoder.stored(KEY, KEY, b"\xff" * (4 << 20), 1)
    assert len(large) > 5 << 20
    assert encoder.stored(KEY, KEY, b"", 1) == native().stored(KEY, KEY, b"", 1)
