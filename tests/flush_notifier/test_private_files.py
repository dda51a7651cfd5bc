"""Files with prompts: how a jsonl sink and a journal create, refuse and report them."""

from __future__ import annotations

import asyncio
import gc
import os
import stat

import pytest

from kvactors.errors import SinkError
from kvactors.flush_notifier.sinks.attention_store import Journal, PublishedBlocks
from kvactors.flush_notifier.sinks.jsonl import CHUNK_HASHES, JsonLinesSink
from kvactors.settings.sinks import JsonLinesSinkConfig
from kvactors.types import Tier
from tests.flush_notifier.helpers import BLOCK, Wired, announced, memory
from tests.flush_notifier.test_sinks import LAYOUT, lines, task
from tests.support.jsonl import replay_jsonl

assert LAYOUT


def directory(path):
    path.mkdir()


def pipe(path):
    os.mkfifo(path)


def link(path):
    (path.parent / "target").write_text("precious")
    path.symlink_to(path.parent / "target")


def dangling(path):
    path.symlink_to(path.parent / "target")


def device(path):
    path.symlink_to("/dev/full")


PLACES = [directory, pipe, link, dangling, device]


@pytest.fixture
def open_umask():
    old = os.umask(0)
    yield
    os.umask(old)


def sink_at(path):
    return JsonLinesSink(JsonLinesSinkConfig(path=str(path)), BLOCK)


@pytest.mark.parametrize("place", PLACES)
async def test_a_path_that_cannot_be_written_is_an_error_at_open(tmp_path, place):
    place(tmp_path / "flush.jsonl")
    with pytest.raises(SinkError, match=r"cannot write .*flush\.jsonl"):
        await sink_at(tmp_path / "flush.jsonl").open()
    target = tmp_path / "target"
    assert not target.exists() or target.read_text() == "precious"


async def test_a_file_that_becomes_a_folder_fails_its_sink_alone(tmp_path):
    seen = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: seen.append(context))
    sink, good = lines(tmp_path), memory("good")
    wired = Wired(good, sink, timeout_s=5.0)
    await sink.open()
    sink.path.unlink()
    sink.path.mkdir()
    async with wired.running():
        await wired.tell(announced(1, 2))
        while not wired.actor.sinks.statistics()[1].failures:
            await asyncio.sleep(0.01)
        assert "directory" in wired.actor.sinks.deliveries[1].last_error
        sink.path.rmdir()
        await wired.settle(20.0)
        assert replay_jsonl(sink.path) == good.view()
    await sink.close()
    gc.collect()
    await asyncio.sleep(0)
    assert seen == []


async def test_a_new_file_is_for_its_user_alone(tmp_path, open_umask):
    sink = lines(tmp_path)
    await sink.open()
    assert stat.S_IMODE(sink.path.stat().st_mode) == 0o600
    await sink.begin_epoch(1)
    assert stat.S_IMODE(sink.path.stat().st_mode) == 0o600
    sink.path.unlink()
    await sink.deliver([task(1)])
    assert stat.S_IMODE(sink.path.stat().st_mode) == 0o600


async def test_a_journal_is_for_its_user_alone_and_not_written_through_a_link(tmp_path, open_umask):
    journal = Journal(str(tmp_path / "journal"), PublishedBlocks(BLOCK))
    await journal.read()
    await journal.rewrite()
    assert stat.S_IMODE(journal.path.stat().st_mode) == 0o600
    (tmp_path / "target").write_text("precious")
    (tmp_path / "journal.new").symlink_to(tmp_path / "target")
    with pytest.raises(SinkError):
        await journal.rewrite()
    other = Journal(str(tmp_path / "other"), PublishedBlocks(BLOCK))
    other.path.symlink_to(tmp_path / "target")
    with pytest.raises(SinkError):
        await other.read()
    assert (tmp_path / "target").read_text() == "precious"


async def test_a_write_that_is_given_up_and_fails_then_is_no_unseen_exception(
    tmp_path, monkeypatch
):
    seen = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: seen.append(context))
    sink, release = lines(tmp_path), loop.create_future()
    await sink.begin_epoch(1)

    async def fails(data):
        await release
        raise SinkError("no space")

    monkeypatch.setattr(sink, "_write", fails)
    call = asyncio.create_task(sink.deliver([task(1)]))
    await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.sleep(0)
    release.set_result(None)
    await asyncio.wait([call])
    assert call.cancelled()
    gc.collect()
    await asyncio.sleep(0)
    assert seen == []


async def test_many_block_hashes_are_one_list(tmp_path):
    sink = lines(tmp_path)
    await sink.open()
    await sink.begin_epoch(1)
    branch = range(CHUNK_HASHES + 3)
    await sink.deliver([task(*branch)])
    assert len(replay_jsonl(sink.path)[Tier.DEVICE]) == CHUNK_HASHES + 3
