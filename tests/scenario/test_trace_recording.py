"""Traces recorded from an open cache and from the KV events of an engine."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import stat
import subprocess
import sys
import threading
from contextlib import asynccontextmanager

import msgspec
import pytest

import kvactors
from kvactors.errors import ConfigError
from kvactors.flush_notifier.sinks.kv_wire import END
from kvactors.scenario import recording as module
from kvactors.scenario.recording import EventRequests, record_command
from kvactors.scenario.replay import ReplayConfig, replay
from kvactors.scenario.trace import read_trace
from tests.cache.test_degraded import fail
from tests.flush_notifier.test_kv_events import answers, socket
from tests.support.cache import BLOCK, opened, prompt, serve, settings

pytestmark = pytest.mark.full

NO_SINKS = {"sinks": ()}
LARGE = {"device": 4096, **NO_SINKS}


def lines_of(path) -> list[dict]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if "header" not in line]


async def written(condition, seconds=30.0):
    """Wait until a thread has written enough."""
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "not written in time"
        await asyncio.sleep(0.01)


# -- of an open cache


@pytest.mark.parametrize("recompute", [True, False])
async def test_a_replay_with_every_block_cached_hits_as_the_run_did(tmp_path, recompute):
    path, rng = tmp_path / "t.jsonl", random.Random(5)
    options = {**LARGE, "cache": {"recompute_last_token": recompute}}
    hits = looked_up = 0
    async with opened(**options) as cache, kvactors.record(cache, path) as recording:
        for number in range(200):
            tokens = prompt(rng.randrange(12), rng.randint(1, 9), tail=rng.choice([0, 0, 1, 3]))
            salt, lora = rng.choice([None, "a", "b"]), rng.choice([None, "french"])
            lease = await serve(cache, f"request {number}", tokens, salt=salt, lora=lora)
            hits += sum(lease.hits)
            looked_up += len(tokens) // BLOCK
    assert (recording.requests, recording.error) == (200, "")
    assert 0.2 < hits / looked_up < 0.95
    report = await replay(path, ReplayConfig.from_mapping(msgspec.to_builtins(settings(**options))))
    assert (report.requests, report.blocks_looked_up) == (200, looked_up)
    assert report.hit_rate["total"] == pytest.approx(hits / looked_up, abs=1e-6)
    assert report.errors == []


async def test_lines_are_in_the_order_of_arrival_and_one_for_each_request(tmp_path):
    path = tmp_path / "t.jsonl"
    async with opened(device=64, **NO_SINKS) as cache:
        before = await cache.acquire("before", prompt(0, 1))
        async with kvactors.record(cache, path):
            await before.finish()
            long = await cache.acquire("long", prompt(1, 3, tail=2))
            with pytest.raises(kvactors.NoRoom):
                await cache.acquire("refused", prompt(2, 100))
            waiting = asyncio.create_task(
                cache.acquire("given up", prompt(3, 61), wait_for_room=True)
            )
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
            preempted = await cache.acquire("preempted", prompt(4, 2))
            await preempted.extend([1, 2, 3])
            await preempted.preempt(2 * BLOCK)
            await serve(cache, "short", prompt(5, 1), output_tokens=9)
            fork = await long.fork()
            fork.abandon()
            again = await cache.acquire("preempted", [*prompt(4, 2), 1, 2, 3])
            await again.extend([4, 5])
            await again.finish()
            (await cache.acquire("abandoned", prompt(6, 2))).abandon()
            last = await cache.acquire("open", prompt(7, 2, tail=1))
            await long.extend([7])
            await long.finish()
        last.abandon()
    lengths = [(line["input_length"], line["output_length"]) for line in lines_of(path)]
    assert lengths == [(14, 1), (8, 5), (4, 9), (8, 0), (9, 0)]
    assert [len(request.ids) for request in read_trace(path)] == [3, 2, 1, 2, 2]
    assert {key for line in lines_of(path) for key in line} == {
        "timestamp",
        "input_length",
        "output_length",
        "hash_ids",
    }
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


async def test_leases_that_a_restart_ends_are_written(tmp_path):
    path = tmp_path / "t.jsonl"
    async with opened(device=16, **NO_SINKS) as cache, kvactors.record(cache, path) as recording:
        lease = await cache.acquire("r", prompt(1, 2))
        await fail(cache, "index", 1)
        with pytest.raises(kvactors.LeaseEnded):
            await lease.finish()
        await serve(cache, "s", prompt(1, 2))
        await written(lambda: recording.requests == 2)
    assert [request.ids.size for request in read_trace(path)] == [2, 2]


@pytest.fixture
def writes(monkeypatch):
    """Each write of a trace takes as many bytes as `writes.before(data)` returns."""

    class Writes:
        def before(self, data):
            return len(data)

    writes, write = Writes(), os.write

    def write_trace(fd, data):
        if threading.current_thread().name.startswith("kvactors-trace"):
            data = data[: writes.before(data)]
        return write(fd, data)

    monkeypatch.setattr(os, "write", write_trace)
    return writes


async def test_a_full_disk_ends_the_recording_and_nothing_else(tmp_path, writes, caplog):
    path, left = tmp_path / "t.jsonl", [500]

    def fill(data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fits = min(left[0], len(data))
        left[0] -= fits
        return fits

    writes.before = fill
    async with opened(**LARGE) as cache, kvactors.record(cache, path) as recording:
        for number in range(50):
            await serve(cache, f"{number}", prompt(number, 3))
        await written(lambda: recording.error)
        assert cache.system.supervisor.instruments.active == ()
        [reason] = cache.health().reasons
        assert reason.component == "trace recording"
        assert "No space left on device" in reason.why
        await serve(cache, "last", prompt(1, 3))
    assert "No space left on device" in recording.error
    assert 0 < recording.requests == len(list(read_trace(path))) < 50
    (line,) = [one for one in caplog.records if "trace recording ended" in one.getMessage()]
    assert "No space left on device" in line.getMessage()


async def test_a_file_that_takes_nothing_ends_the_recording(tmp_path, writes, monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(module, "HELD_BYTES", 2000)

    def wait(data):
        released.wait(60)
        return len(data)

    path = tmp_path / "t.jsonl"
    async with opened(**LARGE) as cache, kvactors.record(cache, path) as recording:
        writes.before = wait
        for number in range(12):
            await serve(cache, f"{number}", prompt(number, 3))
        assert recording.error == "the file is written too slowly"
        released.set()


async def test_a_request_that_does_not_end_holds_a_bounded_part_of_the_trace(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "HELD_BYTES", 4000)
    path = tmp_path / "t.jsonl"
    async with opened(**LARGE) as cache, kvactors.record(cache, path) as recording:
        first = await cache.acquire("first", prompt(100, 2))
        await first.extend([1])
        await (await cache.acquire("preempted", prompt(101, 1))).preempt()
        for number in range(30):
            await serve(cache, f"{number}", prompt(number, 1))
            await written(lambda served=number: recording.requests >= served - 8)
        await first.extend([2])
        await first.finish()
    lengths = [(line["input_length"], line["output_length"]) for line in lines_of(path)]
    assert lengths == [(8, 1), (4, 0), *[(4, 0)] * 30]


async def test_bad_arguments_are_named(tmp_path):
    with pytest.raises(TypeError, match="cache must be an open KVCache, not str"):
        async with kvactors.record("cache", tmp_path / "t.jsonl"):
            pass
    async with opened(device=4, **NO_SINKS) as cache:
        with pytest.raises(OSError, match="No such file"):
            async with kvactors.record(cache, tmp_path / "none" / "t.jsonl"):
                pass
        assert cache.system.supervisor.instruments.active == ()


# -- of the events of an engine


def stored(hashes, parent=None, *, size=BLOCK, **more):
    event = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent}
    tokens = [0] * (size * len(event["block_hashes"]))
    return event | {"token_ids": tokens, "block_size": size, "medium": "GPU"} | more


def feed(*batches, requests=None):
    """The requests of batches (time, event, ..), numbered from 0."""
    found = EventRequests() if requests is None else requests
    for number, (at, *events) in enumerate(batches):
        payload = msgspec.msgpack.encode([at, events, 0])
        found.message([b"", number.to_bytes(8, "big"), payload])
    return found


def paths(found):
    taken = found.order.take(every=True)
    return [(one.at, one.input_length, one.output_length, one.ids.tolist()) for one in taken]


def test_a_chunked_prompt_and_its_output_are_one_request():
    found = feed(
        (100.0, stored([1, 2])),
        (100.5, stored([3, 4], 2)),
        (101.0, stored([5], 4)),
        (101.5, stored([6], 5)),
        (102.0, stored([7, 8], 6)),  # two blocks of output in one step
        (200.0, stored([9], 8)),
        (200.1, stored([20], 2)),
    )
    assert paths(found) == [
        (0.0, 16, 16, [1, 2, 3, 4]),
        (100.0, 36, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (pytest.approx(100.1), 12, 0, [1, 2, 20]),
    ]
    assert (found.requests, found.stored, found.repeated, found.unknown_parents) == (3, 10, 0, 0)


def test_blocks_stored_again_are_counted_and_keep_their_parent():
    found = feed((1.0, stored([8], 7)), (10.0, stored([7], 6)), (20.0, stored([7, 8], 6)))
    assert [ids for *_, ids in paths(found)] == [[7, 8], [7], [7, 8]]
    assert (found.stored, found.repeated, found.unknown_parents) == (4, 3, 2)


@pytest.mark.parametrize(
    "events",
    [
        [stored([1]), stored([2], 1), stored([3], 2)],
        [stored([1, 2, 3], lora_name="x", session_id="s")],
        [stored([1, 2, 3], medium=None), {"type": "BlockRemoved", "block_hashes": [1]}],
        [["BlockStored", [1, 2, 3], None, [0] * 12, BLOCK, None, "GPU", None, [None] * 3]],
        [stored([b"\xff" * 24 + bytes([0] * 7 + [number]) for number in (1, 2, 3)])],
        [{k: v for k, v in stored([1, 2, 3]).items() if k != "medium"}],
        [stored([1, 2, 3]), stored([9], medium="CPU"), {"type": "AllBlocksCleared"}],
    ],
    ids=["one block an event", "more fields", "no medium", "array", "bytes", "left out", "tiers"],
)
def test_the_forms_of_vllm_and_sglang(events):
    assert paths(feed((1.0, *events))) == [(0.0, 12, 0, [1, 2, 3])]


def test_signed_hashes_are_the_same_ids():
    ((*_, ids),) = paths(feed((1.0, stored([-1, 2]))))
    assert ids == [(1 << 64) - 1, 2]


def test_other_cache_groups_are_left_out_and_lost_batches_counted():
    found = feed(
        (1.0, stored([1]), stored([1], group_idx=1), stored([3], size=64)), (9.0, stored([2]))
    )
    found.message([b"", (9).to_bytes(8, "big"), msgspec.msgpack.encode([20.0, [], 0])])
    assert (found.requests, found.left_out, found.lost) == (2, 2, 7)


def test_requests_are_written_once_nothing_can_follow():
    found = feed((1.0, stored([1])), (2.9, stored([2], 1)))
    assert found.order.take() == []
    feed((5.0,), requests=found)
    assert [one.ids.tolist() for one in found.order.take()] == [[1]]


@pytest.mark.parametrize(
    "frames",
    [
        [b"", b"payload"],
        [b"", bytes(8), b"\xc1"],
        [b"", bytes(8), msgspec.msgpack.encode({"stored": 1})],
        [b"", bytes(8), msgspec.msgpack.encode([1, [{"event_type": "stored"}], 0])],
        [b"", bytes(8), msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0])],
        [b"", bytes(8), msgspec.msgpack.encode([1.0, [7], 0])],
    ],
    ids=range(6),
)
def test_other_messages_are_refused(frames):
    with pytest.raises(ConfigError, match="does not publish KV events"):
        EventRequests().message(frames)


def publishing(tmp_path):
    return {
        "kind": "kv_events",
        "endpoint": f"ipc://{tmp_path}/e",
        "replay_endpoint": f"ipc://{tmp_path}/r",
        "numbers": "from_zero",
        "tiers": ["device"],
    }


async def test_the_events_of_a_cache_have_its_requests_that_computed_blocks(tmp_path, monkeypatch):
    """With pauses between the requests. Whole hits leave no event."""
    monkeypatch.setattr(module, "GAP_S", 0.0)
    path, rng, computed = tmp_path / "t.jsonl", random.Random(3), []
    async with opened(device=4096, sinks=[publishing(tmp_path)]) as cache:
        async with kvactors.record(cache, path):
            for number in range(60):
                tokens = prompt(rng.randrange(5), rng.randint(1, 9), tail=1)
                lease = await serve(cache, f"request {number}", tokens)
                computed.append(len(tokens) // BLOCK - sum(lease.hits))
                await cache.wait_flushed()
        found = EventRequests()
        async with socket(5, f"ipc://{tmp_path}/r") as dealer:  # zmq.DEALER
            await dealer.send_multipart([b"", bytes(8)])
            for _, *frames in await answers(dealer):
                if frames[1] != END.to_bytes(8, "big"):
                    found.message(frames)
    wanted = [line["hash_ids"] for line, new in zip(lines_of(path), computed, strict=True) if new]
    assert 5 <= len(wanted) < 60
    assert [ids for *_, ids in paths(found)] == wanted
    assert (found.stored, found.repeated, found.unknown_parents) == (sum(computed), 0, 0)


@asynccontextmanager
async def command(tmp_path, *options):
    program = [sys.executable, "-m", "kvactors", "record", f"ipc://{tmp_path}/e"]
    recorder = await asyncio.create_subprocess_exec(
        *program, "--out", str(tmp_path / "t.jsonl"), *options, stdout=-1, stderr=-1
    )
    try:
        yield recorder
    finally:
        if recorder.returncode is None:
            recorder.kill()
            await recorder.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_command_ends_at_a_signal_with_a_whole_file(tmp_path, number):
    path, served = tmp_path / "t.jsonl", 0
    async with (
        opened(device=4096, sinks=[publishing(tmp_path)]) as cache,
        command(tmp_path) as recorder,
    ):
        while not (path.exists() and path.stat().st_size):  # the header: an event has arrived
            await serve(cache, f"{served}", prompt(served, 2))
            served += 1
            await asyncio.sleep(0.02)
        recorder.send_signal(number)
        out, err = await recorder.communicate()
    assert (recorder.returncode, err) == (0, b"")
    assert b"blocks stored on the device, 0 (0.0%) of them a second time or later" in out
    requests = list(read_trace(path))
    assert f"{len(requests):,} requests in {path}\n".encode() in out
    assert {(len(one.ids), one.input_length) for one in requests} == {(2, 2 * BLOCK)}


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (("ipc://{}/e", "--out", "{}/t.jsonl", "--seconds", "0.1"), 1, "published no block"),
        (("ipc://{}/e", "--out", "{}/t.jsonl", "--seconds", "0"), 2, "seconds must be positive"),
        (("tcp://localhost", "--out", "{}/t.jsonl"), 2, "endpoint tcp://localhost: must be tcp://"),
        (("tcp://*:5557", "--out", "{}/t.jsonl"), 2, "endpoint tcp://*:5557"),
        (("tcp://127.0.0.1:5557", "--out", "-"), 2, "--out must be a file"),
        (("tcp://127.0.0.1:5557", "--out", "{}/none/t.jsonl"), 2, "there is no folder"),
    ],
    ids=range(6),
)
def test_the_command_names_the_error(tmp_path, arguments, status, error):
    words = [word.replace("{}", str(tmp_path)) for word in arguments]
    done = subprocess.run(
        [sys.executable, "-m", "kvactors", "record", *words],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, "")
    assert error in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_pyzmq_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"kvactors\[kv-events\]"):
        record_command("tcp://127.0.0.1:5557", out=tmp_path / "t.jsonl")
