"""The file store: real files with every fault of the table, restarts, kills, and neighbours."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
import threading
from pathlib import Path

import msgspec
import pytest
import structlog

import kvactors
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.storage.file import store as file_module
from kvactors.storage.file.layout import SlabFiles
from kvactors.storage.file.store import FileBackend
from kvactors.storage.file.table import ENTRY_BYTES as ENTRY
from kvactors.storage.file.table import PAGE
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import GOOD, Bench, key, never
from tests.storage.helpers import (
    CORRUPT,
    MISS,
    OK,
    PRINT,
    SIZE,
    Hang,
    at_step,
    cached_config,
    opened,
    serve,
    whole,
)
from tests.support.killed_writer import kill_loop
from tests.support.slab_calls import faults


def slab(bench: Bench) -> Path:
    return bench.store.files.folder / "slab-0000"


def change(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        file.seek(at)
        file.write(data)
        os.fsync(file.fileno())


def slot_of(bench: Bench, number: int) -> int:
    return bench.store.objects[key(number)][0]


# -- faults


@pytest.mark.parametrize("step", range(5))
async def test_a_write_cancelled_at_any_step_leaks_no_slot_and_leaves_no_name(tmp_path, step):
    async with opened(tmp_path, capacity=12) as bench:
        await bench.put(*range(12))

        async def cancel():
            writing.cancel()

        with at_step(bench.store, step, cancel):
            writing = asyncio.get_running_loop().create_task(bench.put(*range(20, 26)))
            await asyncio.gather(writing, return_exceptions=True)
        whole(bench.store)
        assert set(await bench.put(*range(30, 36))) == {OK}
        whole(bench.store)


def refused(fd, _at, _size):
    """A file system that opens for direct I/O, and then does not do it."""
    return -errno.EINVAL if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else None


async def test_threads_that_find_out_together_that_direct_io_is_refused_all_write(tmp_path):
    """Every write has begun with direct I/O before the first one is refused."""
    together = threading.Barrier(4, timeout=30)
    async with opened(tmp_path, depth=4, size=300 << 10) as bench:
        if not bench.store.files.direct:
            pytest.skip("this file system has no direct I/O")

        def refuse(fd, at, size):
            if bench.store.files.direct and refused(fd, at, size):
                together.wait()
                return -errno.EINVAL
            return None

        views = bench.views(4)
        for number, view in enumerate(views):
            view[:] = bench.pattern(number)
        with faults(bench.store, write=refuse):
            reports = await asyncio.gather(
                *(bench.store.write([key(i)], [view], never) for i, view in enumerate(views))
            )
        assert [list(report.outcomes) for report in reports] == [[OK]] * 4
        assert not bench.store.files.direct
        assert set(await bench.get(*range(4))) == {OK}


@pytest.mark.parametrize(
    "fault",
    [
        "payload bit",
        "entry bit",
        "cut in half",
        "empty",
        "another block's bytes",
        "another's entry",
    ],
)
async def test_a_damaged_object_is_a_counted_miss_and_its_slot_is_left_alone(tmp_path, fault):
    async with opened(tmp_path) as bench:
        store = bench.store
        await bench.put(1, 2, 3)
        stride, slot = store.files.meta.stride, slot_of(bench, 3)
        assert slot == 2
        table = store.files.folder / "table"
        if fault == "payload bit":
            raw = slab(bench).read_bytes()[slot * stride + 77]
            change(slab(bench), slot * stride + 77, bytes([raw ^ 1]))
        elif fault == "entry bit":
            raw = table.read_bytes()[PAGE + slot * ENTRY + 20]
            change(table, PAGE + slot * ENTRY + 20, bytes([raw ^ 4]))
        elif fault == "cut in half":
            os.truncate(slab(bench), slot * stride + SIZE // 2)
        elif fault == "empty":
            os.truncate(slab(bench), 0)
        elif fault == "another block's bytes":
            other = slab(bench).read_bytes()[:stride]
            change(slab(bench), slot * stride, other)
        else:
            change(table, PAGE + slot * ENTRY, table.read_bytes()[PAGE : PAGE + ENTRY])
        expected = [CORRUPT, CORRUPT, CORRUPT] if fault == "empty" else [CORRUPT, OK, OK]
        assert await bench.get(3, 1, 2) == expected
        assert await bench.get(3) == [MISS]
        assert store.supply.quarantined == expected.count(CORRUPT)
        assert not store.holds(key(3))
        assert slot not in store.supply.free
        if not fault.startswith("another's"):
            assert await bench.put(4) == [OK]
            assert await bench.get(4) == [OK] or fault in ("cut in half", "empty")


@pytest.mark.parametrize(("size", "calls"), [(SIZE, 1), (100 << 10, 8), (512 << 10, 16)])
async def test_objects_side_by_side_share_a_call_up_to_a_size(tmp_path, size, calls):
    async with opened(tmp_path, size=size) as bench:
        made = []

        def counted(fd, at, size):
            if fd != bench.store.files._table:
                made.append(size)

        with faults(bench.store, read=counted, write=counted):
            assert await bench.put(*range(16)) == [OK] * 16
            assert len(made) == calls
            assert await bench.get(*range(16)) == [OK] * 16
        assert len(made) == 2 * calls
        assert sum(made) == 2 * 16 * bench.store.files.meta.stride


@pytest.mark.parametrize("found_by", ["a read", "a write"])
async def test_a_deleted_folder_is_made_anew_without_objects(tmp_path, found_by):
    async with opened(tmp_path / "store") as bench:
        store = bench.store
        await bench.put(1, 2)
        shutil.rmtree(tmp_path / "store")
        with structlog.testing.capture_logs() as logs:
            if found_by == "a read":
                assert await bench.get(1) == [MISS]
            else:
                assert await bench.put(3) == [Outcome.UNAVAILABLE]
            assert store.keys() == []
            assert store.removed_outside
            assert {key(1), key(2)} <= set(store.take_removed())
            assert "exclude the folder" in store.condition()
            assert await bench.put(3, 1) == [OK, OK]
        assert [one["event"] for one in logs] == ["file store lost", "file store made anew"]
        assert await bench.get(1, 2, 3) == [OK, MISS, OK]
        whole(store)
    async with opened(tmp_path / "store") as bench:
        assert await bench.get(1, 2, 3) == [OK, MISS, OK]


async def test_a_folder_that_cannot_be_made_anew_is_a_condition_until_it_can(tmp_path):
    async with opened(tmp_path / "store") as bench:
        await bench.put(1)
        shutil.rmtree(tmp_path / "store")
        (tmp_path / "store").write_text("in the way")
        assert await bench.put(2) == [Outcome.UNAVAILABLE]
        assert await bench.put(2) == [Outcome.UNAVAILABLE]
        assert "in the way" not in bench.store.condition()
        assert str(tmp_path / "store") in bench.store.condition()
        await bench.store.clear()
        (tmp_path / "store").unlink()
        assert await bench.put(2) == [OK]
        assert await bench.get(1, 2) == [MISS, OK]


async def test_files_are_not_made_anew_under_a_call_that_uses_the_old_ones(tmp_path):
    async with opened(tmp_path / "store") as bench:
        store = bench.store
        await bench.put(1, 2)
        hang = Hang()
        with faults(store, read=hang):
            reading = asyncio.create_task(bench.get(1))
            await hang.begun()
        shutil.rmtree(tmp_path / "store")
        assert await bench.put(3) == [Outcome.UNAVAILABLE]
        remake, calls = store.files.remake, list[bool]()

        def begin_anew(generation: int) -> None:
            calls.append(hang.go.is_set())
            remake(generation)

        store.files.remake = begin_anew
        views = bench.views(2, 8)  # not in the memory of the read
        for view, number in zip(views, (3, 4), strict=True):
            view[:] = bench.pattern(number)
        writing = asyncio.create_task(store.write([key(3), key(4)], views, never))
        await asyncio.sleep(0.1)  # time for a write that ignores the read
        hang.go.set()
        await reading
        assert list((await writing).outcomes) == [OK, OK]
        assert calls == [True]
        assert await bench.get(1, 3, 4) == [MISS, OK, OK]


async def test_a_table_of_another_program_in_the_place_of_a_deleted_one_gives_no_object(tmp_path):
    async with opened(tmp_path / "store") as bench:
        await bench.put(1)
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        shutil.rmtree(tmp_path / "store")
        shutil.copytree(tmp_path / "copy", tmp_path / "store")
        assert await bench.put(2) == [Outcome.UNAVAILABLE]
        assert await bench.put(2) == [OK]
        assert await bench.get(1, 2) == [MISS, OK]
        whole(bench.store)
    async with opened(tmp_path / "store") as bench:
        assert bench.store.keys() == [key(2)]


@pytest.mark.parametrize(
    ("step", "number"), [("payload", 28), ("payload", 30), ("entry", 28), ("entry", 5), ("sync", 5)]
)
async def test_a_full_or_failing_disk_leaves_nothing_behind(tmp_path, step, number):
    async with opened(tmp_path, durability="synced") as bench:
        await bench.put(1)
        table = bench.store.files._table

        def refuse(fd: int, _at: int, _size: int) -> int | None:
            return -number if (fd == table) == (step == "entry") else None

        context = (
            faults(bench.store, sync=lambda _: -number)
            if step == "sync"
            else faults(bench.store, write=refuse)
        )
        with context:
            expected = Outcome.NO_SPACE if number == 28 else Outcome.UNAVAILABLE
            assert await bench.put(2, 3) == [expected] * 2
        one_evicted = step == "payload" and number == errno.ENOSPC  # to write in its place, once
        assert bench.store.keys() == ([] if one_evicted else [key(1)])
        whole(bench.store)
        assert await bench.put(2) == [OK]
        assert await bench.get(1, 2, 3) == [MISS if one_evicted else OK, OK, MISS]


async def test_a_store_that_cannot_be_opened_is_an_error_at_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match="file"):
        await FileBackend(tmp_path / "file", PRINT, SIZE).open()


# -- restarts


async def test_a_restart_finds_everything_in_the_order_it_was_written(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(*range(20))
        await bench.store.remove([key(3)])
        await bench.put(30)
        await bench.get(0)
    async with opened(tmp_path) as bench:
        assert bench.store.keys() == [key(i) for i in (*range(3), *range(4, 20), 30)]
        assert await bench.get(*range(5)) == [OK, OK, OK, MISS, OK]
        assert await bench.put(*range(40, 50)) == [OK] * 10
        assert await bench.get(19, 30, 45) == [OK] * 3


async def test_a_smaller_capacity_keeps_the_youngest_and_gives_slabs_back(tmp_path, monkeypatch):
    monkeypatch.setattr("kvactors.storage.file.store.SLAB_BYTES", 8 * 8192)
    async with opened(tmp_path) as bench:
        await bench.put(*range(28))
        folder = bench.store.files.folder
        assert len(list(folder.glob("slab-*"))) == 4
        await bench.store.remove([key(i) for i in range(8, 28)])
    async with opened(tmp_path, 5) as bench:
        assert bench.store.keys() == [key(i) for i in range(3, 8)]
        assert len(list(folder.glob("slab-*"))) == 1
        assert await bench.get(2, 3, 7) == [MISS, OK, OK]
        assert await bench.put(50) == [OK]
    async with opened(tmp_path) as bench:
        assert len(bench.store.keys()) == 5


# -- neighbours


async def test_a_second_process_is_refused_with_the_holders_id(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1, 2)
        with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
            await FileBackend(tmp_path, PRINT, SIZE).open()
        assert await bench.get(1, 2) == [OK, OK]
    async with opened(tmp_path) as bench:
        assert await bench.get(2) == [OK], "the lock went with its holder"


def test_a_store_whose_loop_was_closed_before_it_gives_its_folder_up(tmp_path):
    dropped, loop = FileBackend(tmp_path, PRINT, SIZE), asyncio.new_event_loop()
    loop.run_until_complete(dropped.open())
    loop.close()

    async def reopen():
        async with opened(tmp_path) as bench:
            assert await bench.put(1) == [OK]
            with pytest.raises(StoreError, match="in use by process"):
                await FileBackend(tmp_path, PRINT, SIZE).open()

    asyncio.run(reopen())


# -- kills


async def test_after_a_kill_everything_announced_is_there_and_whole(tmp_path):
    """Each round a writer is killed (SIGKILL) at a random moment. The blocks announced as stored
    and not as gone are served, with right bytes."""
    seen = await kill_loop(tmp_path, rounds=8, seed=7)
    assert seen.announced >= 8
    assert seen.served > 0
    assert (seen.missing, seen.wrong) == (0, 0)


# -- a whole cache


async def test_the_blocks_of_a_deleted_folder_are_reported_gone(tmp_path):
    sink = {"kind": "memory", "tiers": ["device", "host", "storage"]}
    async with kvactors.open(cached_config(sink, directory=str(tmp_path / "store"))) as cache:
        for seed in range(5):
            await serve(cache, seed)
        await cache.wait_idle()
        await cache.clear()
        shutil.rmtree(tmp_path / "store")
        await serve(cache, 90)
        await cache.wait_idle()
        await cache.wait_flushed()
        assert cache.count_divergent_blocks() == 0
        assert "exclude the folder" in cache.health().reasons[0].why
        await serve(cache, 91)
        await cache.wait_idle()
        await cache.wait_flushed()
        await cache.clear()
        assert (await serve(cache, 91)).storage == 4
        await cache.wait_idle()
        await cache.wait_flushed()
        assert cache.count_divergent_blocks() == 0
        assert cache.check() == []


async def test_the_namespace_rank_and_directory_of_fastdeploys_file_store(tmp_path, monkeypatch):
    settings = cached_config(directory=".", namespace="model-7b", rank=1, ranks=4)
    bare = msgspec.structs.replace(
        settings, storage=msgspec.structs.replace(settings.storage, directory="")
    )
    with pytest.raises(kvactors.ConfigError, match="directory"):
        async with kvactors.open(bare):
            pass
    monkeypatch.setenv("FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    async with kvactors.open(bare) as cache:
        await serve(cache, 1)
    folder = StoreIdentity(settings.cache.model, "model-7b", bytes(32), 1, 4).folder(tmp_path)
    assert (folder.parent.name, folder.name) == ("model-7b", "rank-1-of-4")
    assert folder.is_dir()


async def test_a_batch_has_one_result_for_each_object(tmp_path):
    """An object that is stored is not written again, a query ends at a gap, and no objects are no
    error."""
    async with opened(tmp_path) as bench:
        assert await bench.put(0, 1, 3) == [OK] * 3
        (view,) = bench.views(1)
        view[:] = b"\xee" * SIZE
        assert (await bench.store.write([key(1)], [view], never)).outcomes[0] in GOOD
        assert await bench.get(1, 2) == [OK, MISS], "a name stands for one content"
        keys = [key(number) for number in range(4)]
        assert [bench.store.probe(some) for some in (keys, keys[2:], [])] == [2, 0, 0]
        assert await bench.put() == await bench.get() == []


async def test_a_clear_forgets_the_objects_and_touches_no_other_file(tmp_path):
    """FastDeploy's removes every *.pd below its folder, and refuses folders such as /."""
    async with opened(tmp_path) as bench:
        folder = bench.store.files.folder
        others = [tmp_path / "a.pd", folder / "b.pd", folder.parent / "slab-0000"]
        for number, path in enumerate(others):
            path.write_bytes(bytes([number]) * 99)
        await bench.put(1, 2)
        await bench.store.clear()
        assert await bench.get(1, 2) == [MISS, MISS]
    async with opened(tmp_path) as bench:
        assert bench.store.keys() == []
        assert await bench.put(1) == [OK]
    for number, path in enumerate(others):
        assert path.read_bytes() == bytes([number]) * 99


# -- Tasks of a file store end when the loop ends, on any disk.


HANG = 20.0
"""Seconds after which the disk of a test answers, so that a failure is no hang."""


class Disk:
    """Calls of SlabFiles that hang until `answers` is set."""

    def __init__(self, monkeypatch, call: str) -> None:
        self.entered, self.answers = threading.Event(), threading.Event()
        done = getattr(SlabFiles, call)

        def hanging(files, *args):
            self.entered.set()
            self.answered = self.answers.wait(HANG)
            return done(files, *args)

        self.answered = None
        monkeypatch.setattr(SlabFiles, call, hanging)


@pytest.mark.parametrize("call", ["grow", "advance"])
def test_a_loop_ends_although_a_step_of_the_store_hangs(tmp_path, monkeypatch, call):
    disk = Disk(monkeypatch, call)

    async def main():
        store = FileBackend(tmp_path, PRINT, SIZE, 4)
        await store.open()
        work = (
            store.write([bytes(32)], [memoryview(bytes(SIZE))], lambda: False)
            if call == "grow"
            else store.clear()
        )
        main.task = asyncio.create_task(work)
        while not disk.entered.is_set():
            await asyncio.sleep(0.001)

    asyncio.run(main())  # cancels the task, and the step's
    waited = disk.answered is not None
    disk.answers.set()
    assert not waited, "the loop ended only when the disk answered"
    assert main.task.cancelled()


async def test_a_lock_that_is_replaced_again_and_again_is_an_error(tmp_path, monkeypatch):
    stat = os.fstat
    monkeypatch.setattr(
        os, "fstat", lambda fd: os.stat_result((*stat(fd)[:1], 1, *stat(fd)[2:]))
    )  # another file is at its path
    store = FileBackend(tmp_path, PRINT, SIZE, 4)
    with pytest.raises(StoreError, match="another file took its place 100 times"):
        await store.open()
    await store.close()


# -- slabs ahead of their need


@pytest.fixture
def small_slabs(monkeypatch):
    """Eight slots each."""
    monkeypatch.setattr(file_module, "SLAB_BYTES", 8 * 8192)


async def grown(bench: Bench, slabs: int) -> None:
    """Wait until the store has a number of slabs, all of whose slots are known."""
    store = bench.store
    for _ in range(int(1000 * HANG)):
        if len(store.files.slabs) >= slabs and store.supply._growing is None:
            break
        await asyncio.sleep(0.001)
    assert len(store.files.slabs) == slabs
    whole(store)


async def test_a_batch_does_not_wait_for_the_slab_that_follows(tmp_path, monkeypatch, small_slabs):
    async with opened(tmp_path) as bench:
        await bench.put(1)
        disk = Disk(monkeypatch, "grow")
        assert await bench.put(*range(2, 6)) == [OK] * 4
        while not disk.entered.is_set():
            await asyncio.sleep(0.001)
        assert await bench.put(6, 7) == [OK] * 2
        waiting = asyncio.create_task(bench.put(*range(8, 12)))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "one slot is free, and the next slab is not there yet"
        looks = iter(range(4))
        late = await bench.put(20, expired=lambda: next(looks, None) is None)
        assert late == [Outcome.LATE], "a disk that hangs holds no write beyond its deadline"
        disk.answers.set()
        assert await waiting == [OK] * 4
        await grown(bench, 2)


async def test_a_store_does_not_grow_ahead_beyond_its_capacity(tmp_path, small_slabs):
    async with opened(tmp_path, capacity=16) as bench:
        await bench.put(*range(15))
        await grown(bench, 2)
        await bench.put(*range(15, 40))
        await grown(bench, 2)


async def test_a_disk_that_is_full_is_asked_for_the_next_slab_after_a_pause(
    tmp_path, monkeypatch, small_slabs
):
    async with opened(tmp_path) as bench:
        await bench.put(*range(4))
        asked = []
        monkeypatch.setattr(SlabFiles, "grow", lambda _: (asked.append(1), Outcome.NO_SPACE)[1])
        for number in range(4, 8):
            assert await bench.put(number) == [OK]
            while not asked or bench.store.supply._growing is not None:
                await asyncio.sleep(0.001)
        assert len(asked) == 1
        assert len(bench.store.keys()) == 8
