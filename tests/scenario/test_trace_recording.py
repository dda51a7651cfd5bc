"""Traces of an engine's requests, recorded from its KV events."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
import signal
import stat
import sys
from contextlib import asynccontextmanager

import msgspec
import pytest
import zmq

from kvactors.__main__ import main
from kvactors.errors import ConfigError
from kvactors.flush_notifier.sinks.kv_wire import END
from kvactors.scenario import recording as module
from kvactors.scenario.recording import EventRequests, record_command, trace_file
from kvactors.scenario.trace import read_trace
from tests.flush_notifier.test_kv_events import answers, socket
from tests.support.cache import BLOCK, opened, prompt, serve

pytestmark = pytest.mark.full


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
    return [tuple(line.values()) for line in found.take(every=True)]


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
        (0, 16, 16, [1, 2, 3, 4]),
        (100_000, 36, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (100_100, 12, 0, [1, 2, 20]),
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
    assert paths(feed((1.0, *events))) == [(0, 12, 0, [1, 2, 3])]


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
    assert found.take() == []
    feed((5.0,), requests=found)
    assert [line["hash_ids"] for line in found.take()] == [[1]]


def test_a_request_that_does_not_end_holds_a_bounded_part_of_the_trace(monkeypatch):
    monkeypatch.setattr(module, "MAX_WAITING", 3)
    found = feed(*((0.1 * number, stored([number])) for number in range(5)))
    assert [line["hash_ids"] for line in found.take()] == [[0], [1]]


def test_a_full_disk_leaves_whole_lines(tmp_path, monkeypatch):
    write, left = os.write, [30]

    def fill(fd, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= (fits := min(left[0], len(data)))
        return write(fd, data[:fits])

    monkeypatch.setattr(os, "write", fill)
    with trace_file(tmp_path / "t.jsonl") as append:
        append([{"hash_ids": [1]}])
        with pytest.raises(OSError, match="No space left"):
            append([{"hash_ids": [2, 3]}, {"hash_ids": [4]}])
    assert (tmp_path / "t.jsonl").read_text() == '{"hash_ids":[1]}\n'
    assert stat.S_IMODE((tmp_path / "t.jsonl").stat().st_mode) == 0o600


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
    rng, computed = random.Random(3), []
    async with opened(device=4096, sinks=[publishing(tmp_path)]) as cache:
        for number in range(60):
            tokens = prompt(rng.randrange(5), rng.randint(1, 9), tail=1)
            lease = await serve(cache, f"request {number}", tokens)
            if new := len(tokens) // BLOCK - sum(lease.hits):
                computed.append((tokens, new))
            await cache.wait_flushed()
        found = EventRequests()
        async with socket(5, f"ipc://{tmp_path}/r") as dealer:  # zmq.DEALER
            await dealer.send_multipart([b"", bytes(8)])
            for _, *frames in await answers(dealer):
                if frames[1] != END.to_bytes(8, "big"):
                    found.message(frames)
    assert 5 <= len(computed) < 60
    lines = found.take(every=True)
    assert [line["input_length"] for line in lines] == [
        len(one) // BLOCK * BLOCK for one, _ in computed
    ]
    first: dict[int, list[int]] = {}  # the block that each block follows
    for line in lines:
        for above, block in itertools.pairwise([0, *line["hash_ids"]]):
            assert first.setdefault(block, above) == above
    assert found.stored == len(first) == sum(new for _, new in computed)
    assert (found.repeated, found.unknown_parents) == (0, 0)


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


async def test_a_message_of_another_format_ends_the_command_with_a_whole_file(tmp_path):
    path, sent = tmp_path / "t.jsonl", 0
    with zmq.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.bind(f"ipc://{tmp_path}/e")
        async with command(tmp_path) as recorder:
            while not (path.exists() and path.stat().st_size):  # the header
                payload = msgspec.msgpack.encode([1.0, [stored([sent])], 0])
                publisher.send_multipart([b"", sent.to_bytes(8, "big"), payload])
                sent += 1
                await asyncio.sleep(0.02)
            publisher.send_multipart([b"", b"another message"])
            _, err = await recorder.communicate()
    assert recorder.returncode == 2
    assert b"does not publish KV events" in err
    assert [one.input_length for one in read_trace(path)][-1] == BLOCK


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
def test_the_command_names_the_error(tmp_path, capsys, arguments, status, error):
    with pytest.raises(SystemExit) as ended:
        main(["record", *(word.replace("{}", str(tmp_path)) for word in arguments)])
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (status, "")
    assert error in err
    assert err.count("\n") == 1


def test_a_missing_pyzmq_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ConfigError, match=r"kvactors\[cli,kv-events\]"):
        record_command("tcp://127.0.0.1:5557", out=tmp_path / "t.jsonl")
