"""Sinks by themselves: the file of JSON lines through torn writes and faults, and the memory sink's
own checks."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import aiofiles
import msgspec
import pytest

import kvactors
from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks import make_sink
from kvactors.flush_notifier.sinks.jsonl import CHUNK_TOKENS, TAIL_BYTES, JsonLinesSink
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.flush_notifier.view import SinkFilter
from kvactors.layout.gqa import GQALayout
from kvactors.settings import Config
from kvactors.settings.sinks import JsonLinesSinkConfig, MemorySinkConfig
from kvactors.types import Reason, Residency, Tier, join_hashes
from tests.flush_notifier.helpers import BLOCK, ROOT, memory, names, path
from tests.support.jsonl import replay_jsonl

NOTHING = {tier: set() for tier in Tier}


LAYOUT = GQALayout(1, 1, 2, BLOCK)


def task(
    *branch: int, start=0, residency=Residency.RESIDENT, tier=Tier.DEVICE, epoch=1
) -> FlushTask:
    parent = names(*branch)[start - 1] if start else ROOT
    keys = names(*branch)[start:]
    return FlushTask(
        path(*branch)[0],
        start,
        len(keys),
        join_hashes(keys),
        parent,
        residency,
        tier,
        Reason.COMMIT,
        epoch,
    )


def lines(tmp_path) -> JsonLinesSink:
    return JsonLinesSink(
        JsonLinesSinkConfig(path=str(tmp_path / "flush.jsonl"), tiers=("device", "host")), BLOCK
    )


# -- JSON lines


async def test_a_line_has_every_field_of_its_task(tmp_path):
    sink = lines(tmp_path)
    await sink.begin_epoch(5)
    await sink.deliver([task(1, 2, 3, start=1, epoch=5)])
    epoch, flush = map(json.loads, sink.path.read_text().splitlines())
    assert epoch == {"type": "epoch", "epoch": 5}
    assert flush == {
        "type": "flush",
        "epoch": 5,
        "residency": "resident",
        "tier": "device",
        "reason": "commit",
        "start_block_idx": 1,
        "count": 2,
        "keys": [key.hex() for key in names(1, 2, 3)[1:]],
        "parent": names(1)[0].hex(),
        "num_tokens": 6,
        "tokens": [1, 1, 2, 2, 3, 3],
    }


async def test_a_path_of_many_chunks_is_one_list(tmp_path):
    sink, steps = lines(tmp_path), range(CHUNK_TOKENS + 1)
    tokens = path(*range(4))[0] * ((CHUNK_TOKENS + 4) // 4)
    await sink.begin_epoch(1)
    await sink.deliver([msgspec.structs.replace(task(1), tokens=tokens[: 4 * BLOCK * len(steps)])])
    told = json.loads(sink.path.read_text().splitlines()[1])["tokens"]
    assert told == ([0, 0, 1, 1, 2, 2, 3, 3] * len(steps))[: BLOCK * len(steps)]


async def test_an_epoch_makes_everything_sent_before_void(tmp_path):
    sink = lines(tmp_path)
    await sink.begin_epoch(1)
    await sink.deliver([task(1)])
    await sink.begin_epoch(2)
    await sink.deliver(
        [
            task(2, epoch=2),
            task(2, residency=Residency.GONE, epoch=2),
            task(3, tier=Tier.HOST, epoch=2),
        ]
    )
    assert replay_jsonl(sink.path) == NOTHING | {Tier.HOST: set(names(3))}


@pytest.mark.parametrize(
    "torn", [b"", b'{"type": "flush", "residency"', b"x" * (2 * TAIL_BYTES + 5)]
)
async def test_a_line_cut_short_by_a_crash_is_removed_before_the_next(tmp_path, torn):
    sink = lines(tmp_path)
    await sink.begin_epoch(1)
    await sink.deliver([task(1)])
    whole = sink.path.read_bytes()
    sink.path.write_bytes(whole + torn)
    assert replay_jsonl(sink.path)[Tier.DEVICE] == set(names(1)), (
        "readers may come before the writer does"
    )
    after = lines(tmp_path)
    await after.begin_epoch(2)
    assert sink.path.read_bytes() == whole + b'{"type":"epoch","epoch":2}\n'


async def test_a_call_that_is_given_up_ends_with_its_write(tmp_path, monkeypatch):
    """The first write hangs past its caller's patience, and then is cut short by an error: the file
    has whole lines only."""
    sink, release = lines(tmp_path), asyncio.get_running_loop().create_future()
    await sink.begin_epoch(1)
    plain = aiofiles.open

    class Slow:
        def __init__(self, *args, **options):
            self.context = plain(*args, **options)

        async def __aenter__(self):
            self.file = await self.context.__aenter__()
            return self

        async def __aexit__(self, *error):
            return await self.context.__aexit__(*error)

        async def write(self, data):
            await self.file.write(data[: len(data) // 2])
            await release
            raise OSError("no space")

    monkeypatch.setattr("kvactors.flush_notifier.sinks.jsonl.aiofiles.open", Slow)
    first = asyncio.create_task(sink.deliver([task(1)]))
    await asyncio.sleep(0.05)
    first.cancel()
    await asyncio.sleep(0.05)
    assert not first.done()
    monkeypatch.undo()
    release.set_result(None)
    await asyncio.wait([first])
    assert first.cancelled()
    await sink.deliver([task(1, 2)])
    assert replay_jsonl(sink.path)[Tier.DEVICE] == set(names(1, 2))
    assert len(sink.path.read_bytes().splitlines()) == 2


@pytest.mark.parametrize("kept", [0, 1, 2])
async def test_a_full_file_is_renamed_before_the_next_lines(tmp_path, kept):
    config = JsonLinesSinkConfig(path=str(tmp_path / "f"), max_bytes="1 k", backup_count=kept)
    sink = JsonLinesSink(config, BLOCK)
    await sink.begin_epoch(1)
    for block in range(1, 13):
        await sink.deliver([task(block)])
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["f", "f.1", "f.2"][: kept + 1]
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    assert all(1024 <= file.stat().st_size < 2048 for file in files[1:])
    found = [json.loads(line) for file in reversed(files) for line in file.read_text().splitlines()]
    keys = [key for line in found for key in line.get("keys", ())]
    sent = [names(block)[0].hex() for block in range(1, 13)]
    assert keys == sent[-len(keys) :]


async def test_a_file_that_cannot_be_renamed_is_an_error_that_writes_nothing(tmp_path):
    config = JsonLinesSinkConfig(path=str(tmp_path / "f"), max_bytes=1, backup_count=1)
    sink = JsonLinesSink(config, BLOCK)
    await sink.begin_epoch(1)
    (tmp_path / "f.1").mkdir()
    before = sink.path.read_bytes()
    with pytest.raises(SinkError, match="directory"):
        await sink.deliver([task(1)])
    assert sink.path.read_bytes() == before
    (tmp_path / "f.1").rmdir()
    await sink.deliver([task(1)])
    assert replay_jsonl(sink.path)[Tier.DEVICE] == set(names(1))
    assert (tmp_path / "f.1").read_bytes() == before


@pytest.mark.parametrize("kept", [0, 1])
async def test_a_full_file_that_another_process_has_removed_is_begun_anew(tmp_path, kept):
    config = JsonLinesSinkConfig(path=str(tmp_path / "f"), max_bytes=1, backup_count=kept)
    sink = JsonLinesSink(config, BLOCK)
    await sink.begin_epoch(1)
    sink.path.unlink()
    await sink.deliver([task(1)])
    assert replay_jsonl(sink.path)[Tier.DEVICE] == set(names(1))


@pytest.mark.parametrize("how", ["truncated", "moved", "removed"])
async def test_a_file_that_another_process_changes_loses_written_lines_and_no_later_ones(
    tmp_path, how
):
    """docs/flush.md: earlier lines are not written again, and the lines that follow are whole."""
    sink = lines(tmp_path)
    await sink.begin_epoch(1)
    await sink.deliver([task(1, 2)])
    whole = sink.path.read_bytes()
    if how == "truncated":
        os.truncate(sink.path, 0)
    else:
        sink.path.rename(tmp_path / "rotated")
    if how == "removed":
        (tmp_path / "rotated").unlink()
    await sink.deliver([task(3)])
    assert replay_jsonl(sink.path)[Tier.DEVICE] == set(names(3))
    assert len(sink.path.read_bytes().splitlines()) == 1
    assert stat.S_IMODE(sink.path.stat().st_mode) == 0o600
    if how == "moved":
        assert (tmp_path / "rotated").read_bytes() == whole
    await sink.begin_epoch(2)  # a later incarnation is sent everything again
    await sink.deliver([task(1, 2), task(3)])
    assert replay_jsonl(sink.path)[Tier.DEVICE] == {*names(1, 2), *names(3)}
    await sink.close()


SCRIPT = """
    import asyncio, sys, threading
    import kvactors
    from kvactors.flush_notifier.sinks import jsonl
    from kvactors.flush_notifier.sinks import attention_store

    never = threading.Event()
    plain = jsonl.open_private

    def hung(path, flags):
        if armed:
            never.wait()
        return plain(path, flags)

    armed = False
    jsonl.open_private = attention_store.open_private = hung

    async def main():
        global armed
        config = kvactors.Config.from_mapping({{
            "cache": {{"model": "m", "block_size": 4}}, "device": {{"num_blocks": 8}}, "actors": {{"drain_timeout_s": 0.5}},
            "flush": {{"sinks": [{{"kind": "jsonl", "path": {path!r}}}], "timeout_s": 0.2}},
        }})
        async with kvactors.open(config) as cache:
            armed = True
            async with await cache.acquire("a", list(range(8))) as lease:
                await lease.commit(8)
            while not cache.health().reasons:
                await asyncio.sleep(0.01)
        if sys.argv[1] == "journal":
            waiting = asyncio.ensure_future(attention_store.Journal({path!r}, None).read())
            await asyncio.sleep(0.05)
            waiting.cancel()

    asyncio.run(main())
    print("ended")
"""


@pytest.mark.parametrize("file", ["jsonl", "journal"])
def test_a_process_ends_although_a_disk_does_not_answer(tmp_path, file):
    """No thread of asyncio's default executor is in such a call: `asyncio.run` would wait for it
    without limit."""
    script = textwrap.dedent(SCRIPT).format(path=str(tmp_path / "flush.jsonl"))
    done = subprocess.run(
        [sys.executable, "-c", script, file], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ended\n", done.stderr
    assert done.returncode == 0


def test_no_module_uses_the_default_executor():
    """A call in it that does not return keeps the process from its end. aiofiles uses it unless it
    is given another."""
    package = Path(kvactors.__file__).parent
    words = ("run_in_executor", "asyncio.to_thread")
    tools = ("testing", "top.py")
    files = [
        file for file in package.rglob("*.py") if file.relative_to(package).parts[0] not in tools
    ]
    assert [str(file) for file in files if any(word in file.read_text() for word in words)] == []
    of_aiofiles = [
        node
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("aiofiles.")
    ]
    assert len(of_aiofiles) > 5
    assert [
        ast.unparse(call)
        for call in of_aiofiles
        if "executor" not in [word.arg for word in call.keywords]
    ] == []


async def test_an_error_of_the_file_system_is_a_sink_error(tmp_path):
    sink = lines(tmp_path)
    sink.path.mkdir()
    with pytest.raises(SinkError, match="directory"):
        await sink.begin_epoch(1)
    sink.path.rmdir()
    await sink.begin_epoch(1)
    assert replay_jsonl(sink.path) == NOTHING


def test_a_folder_that_is_not_there_is_an_error_at_once(tmp_path):
    with pytest.raises(SinkError, match="is not a folder"):
        make_sink(
            JsonLinesSinkConfig(path=str(tmp_path / "missing" / "flush.jsonl")), Config(), LAYOUT
        )


@pytest.mark.parametrize("line", [b"nonsense\n", b'{"type":"other"}\n'])
def test_a_line_that_is_none_is_a_value_error(tmp_path, line):
    (tmp_path / "flush.jsonl").write_bytes(line)
    with pytest.raises(ValueError):
        replay_jsonl(tmp_path / "flush.jsonl")


def test_a_config_makes_its_sink(tmp_path):
    made = make_sink(
        JsonLinesSinkConfig(path=str(tmp_path / "a"), granularity="node", tiers=("host",)),
        Config(),
        LAYOUT,
    )
    assert isinstance(made, JsonLinesSink)
    assert made.filter == SinkFilter(int(Tier.HOST), node=True, at_finish=False)
    other = make_sink(
        MemorySinkConfig(name="m", report_gains_at="request_finish"), Config(), LAYOUT
    )
    assert isinstance(other, MemorySink)
    assert other.name == "m"
    assert other.filter == SinkFilter(int(Tier.DEVICE | Tier.HOST), node=False, at_finish=True)


# -- the memory sink's checks: tasks that a wrong ledger could send

WRONG = {
    "count": {"count": 2},
    "no blocks": {"count": 0, "hashes": b""},
    "own tokens only": {"tokens": path(3)[0]},
    "longer path": {"tokens": path(1, 2, 3, 4)[0]},
    "start counted from 1": {"start_block_idx": 3},
    "no parent": {"parent": b""},
    "parent at another depth": {"parent": names(1)[0]},
    "another path": {"hashes": names(1, 2)[1]},
    "other tokens": {"tokens": path(1, 2, 9)[0]},
    "old epoch": {"epoch": 0},
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_task_that_does_not_add_up_is_refused_and_nothing_of_its_batch_counts(wrong):
    sink = memory("strict")
    await sink.begin_epoch(1)
    await sink.deliver([task(1, 2, 3)])
    before = sink.view()
    bad = msgspec.structs.replace(task(1, 2, 3, start=2, residency=Residency.GONE), **WRONG[wrong])
    with pytest.raises(SinkError):
        await sink.deliver([task(7), bad])
    assert sink.view() == before
    await sink.deliver([task(1, 2, 3, start=2, residency=Residency.GONE)])
    assert sink.view()[Tier.DEVICE] == set(names(1, 2))


async def test_tasks_before_an_epoch_are_refused():
    with pytest.raises(SinkError, match="the epochs begun are"):
        await memory("strict").deliver([task(1)])
