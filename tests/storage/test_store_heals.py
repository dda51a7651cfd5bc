"""The file store on disks that are full, fail for a moment, hang, or are read while objects are
removed, and in processes that fork."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading

import pytest
import structlog

from kvactors.errors import StoreError
from kvactors.storage.file import store as file_module
from kvactors.storage.file.layout import SlabFiles
from kvactors.storage.file.store import FileBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import key
from tests.storage.helpers import MISS, OK, PRINT, SIZE, Hang, opened, whole
from tests.support import slab_calls
from tests.support.slab_calls import faults

UNAVAILABLE, NO_SPACE = Outcome.UNAVAILABLE, Outcome.NO_SPACE


@pytest.fixture
def small_slabs(monkeypatch):
    """Eight slots each."""
    monkeypatch.setattr(file_module, "SLAB_BYTES", 8 * 8192)


def failing(number):
    def call(*_args, **_keywords):
        raise OSError(number, os.strerror(number))

    return call


# -- full


async def test_a_disk_that_becomes_full_evicts_the_least_recently_used(
    tmp_path, monkeypatch, small_slabs
):
    async with opened(tmp_path) as bench:
        store = bench.store
        await bench.put(*range(12))
        monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
        views = bench.views(10)
        for view, number in zip(views, range(20, 30), strict=True):
            view[:] = bench.pattern(number)
        report = await store.write([key(n) for n in range(20, 30)], views, lambda: False)
        assert list(report.outcomes) == [OK] * 10
        assert sorted(report.evicted) == [key(n) for n in range(6)]
        assert await bench.get(*range(20, 30)) == [OK] * 10
        assert await bench.get(5, 6, 11) == [MISS, OK, OK]
        whole(store)
        assert store.statistics().evicted == 6


async def test_the_floor_of_free_space_evicts_as_a_full_disk_does(tmp_path, small_slabs):
    async with opened(tmp_path) as bench:
        await bench.put(*range(4))
        bench.store.files.floor = 1 << 60
        assert await bench.put(*range(10, 16)) == [OK] * 6
        assert await bench.get(1, 2, 15) == [MISS, OK, OK]
        assert "or storage.free_space_floor" in bench.store.condition()


async def test_no_space_at_a_write_takes_one_objects_place(tmp_path, monkeypatch, small_slabs):
    """A disk that allocates when a slot is written first: the slots that are not written yet cannot
    be."""
    async with opened(tmp_path) as bench:
        await bench.put(*range(4))
        used = set(range(4))

        def allocating(_fd, at, _size):
            return None if at // 8192 in used else -errno.ENOSPC

        with faults(bench.store, write=allocating):
            assert await bench.put(10) == [OK]
            assert await bench.put(11) == [OK]
        assert await bench.get(0, 1, 2, 3, 10, 11) == [MISS, MISS, OK, OK, OK, OK]
        while bench.store.supply._growing is not None:  # a thread adds slots
            await asyncio.sleep(0.001)
        whole(bench.store)


async def test_a_disk_that_refuses_every_write_does_not_empty_the_store(
    tmp_path, monkeypatch, small_slabs
):
    async with opened(tmp_path) as bench:
        await bench.put(*range(8))
        with faults(bench.store, write=slab_calls.failing(errno.ENOSPC)):
            for number in range(20, 40):
                assert await bench.put(number) == [NO_SPACE]
        assert len(bench.store.keys()) >= 6
        whole(bench.store)


# -- capacity


def capacity_of(bench):
    return bench.store.supply.capacity


async def test_a_capacity_counts_the_objects_of_other_layouts_in_the_folder(tmp_path, small_slabs):
    async with opened(tmp_path, 40, print_=bytes(32)) as other:
        await other.put(*range(17))  # in slabs of 24 slots
        async with opened(tmp_path, 40) as bench:
            assert capacity_of(bench) == 23
            assert bench.store.condition() == ""
            await bench.put(*range(100, 130))
            assert len(bench.store.keys()) == 23
            await other.put(*range(20, 30))
            due(bench)
            with structlog.testing.capture_logs() as logs:
                await bench.put(100)
            assert (capacity_of(bench), len(bench.store.keys())) == (23, 23), "good objects stay"
            assert [one["event"] for one in logs] == ["file store is too small"]
            assert "prune" in bench.store.condition()
            await other.store.clear()
            due(bench)
            await bench.put(101)
            assert (capacity_of(bench), bench.store.condition()) == (40, "")


def due(bench):
    """The space is looked at with the next write."""
    bench.store._space_due = 0.0


async def test_a_capacity_that_is_not_set_follows_the_free_space(
    tmp_path, monkeypatch, small_slabs
):
    free = 10 * 8192
    monkeypatch.setattr(SlabFiles, "free_bytes", lambda _: free)
    with structlog.testing.capture_logs() as logs:
        async with opened(tmp_path) as bench:
            assert capacity_of(bench) == 8
            await bench.put(*range(20))
            assert len(bench.store.keys()) <= 8
            assert "free space" in bench.store.condition()
            free = 1 << 40
            due(bench)
            await bench.put(*range(20))
            assert len(bench.store.keys()) == 20
            assert bench.store.condition() == ""
            free = 0
            due(bench)
            await bench.put(1)
            assert len(bench.store.keys()) == 20, "their eviction frees nothing"
    assert [one["event"] for one in logs if one["log_level"] == "warning"] == [
        "file store is too small"
    ] * 2


async def test_a_disk_that_was_full_at_the_start_gets_whole_slabs_later(
    tmp_path, monkeypatch, small_slabs
):
    with monkeypatch.context() as patch:
        patch.setattr(SlabFiles, "free_bytes", lambda _: 0)
        async with opened(tmp_path):
            pass
    async with opened(tmp_path) as bench:
        await bench.put(1)
        assert bench.store.files.meta.slots_per_slab == 8
        assert await bench.get(1) == [OK]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free space on the disk"),
        (errno.EDQUOT, "raise the quota"),
        (errno.EACCES, "give the process write access"),
    ],
)
async def test_a_store_that_cannot_grow_to_its_capacity_states_why_until_it_can(
    tmp_path, monkeypatch, small_slabs, number, remedy
):
    async with opened(tmp_path, 32) as bench:
        await bench.put(*range(4))
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", failing(number))
            await bench.put(*range(10, 22))
        assert remedy in bench.store.condition()
        bench.store.supply.pause_until = 0.0
        await bench.put(*range(30, 42))
        assert bench.store.condition() == ""


# -- bad objects and bad moments


@pytest.mark.parametrize("call", ["preadv", "pread", "stat"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EAGAIN])
async def test_an_error_of_a_moment_is_unavailable_and_costs_nothing(tmp_path, call, number):
    async with opened(tmp_path) as bench:
        await bench.put(1, 2)
        table = bench.store.files._table

        def refuse(fd, _at, _size):
            return -number if (fd == table) == (call == "pread") else None

        with faults(
            bench.store,
            read=None if call == "stat" else refuse,
            inode=(lambda: -number) if call == "stat" else None,
        ):
            assert await bench.get(1, 2) == [UNAVAILABLE] * 2
        assert await bench.get(1, 2) == [OK] * 2
        assert bench.store.supply.quarantined == 0


async def test_objects_that_go_while_they_are_read_are_misses_and_not_corrupt(tmp_path):
    async with opened(tmp_path, 8) as bench:
        store = bench.store
        for step, action in enumerate((store.remove, None, store.clear)):
            await bench.put(1, 2)
            hang = Hang(lambda fd, *_: fd == store.files._table)  # after the payload
            with faults(store, read=hang):
                reading = asyncio.create_task(bench.get(1))
                await hang.begun()
            if action is None:
                await bench.put(*range(10, 18))
            else:
                await (action([key(1)]) if step == 0 else action())
            again = [] if step else await bench.put(1)
            hang.go.set()
            assert await reading == [MISS]
            assert await bench.get(1) == ([OK] if again else [MISS]), "what was written again stays"


# -- open and close


@pytest.mark.parametrize("step", range(1, 8))
async def test_a_cancelled_open_leaves_no_lock_and_no_thread(tmp_path, step):
    async with opened(tmp_path, 4) as bench:
        await bench.put(1, 2)
    before = threading.active_count()
    store = FileBackend(tmp_path, PRINT, SIZE, 4)
    opening = asyncio.create_task(store.open())
    for _ in range(step):
        await asyncio.sleep(0)
    opening.cancel()
    opening.cancel()
    outcome = (await asyncio.gather(opening, return_exceptions=True))[0]
    if outcome is None:
        await store.close()
    async with opened(tmp_path, 4) as bench:
        assert await bench.get(1, 2) == [OK, OK]
    await threads_down_to(before)


async def threads_down_to(count):
    for _ in range(3000):
        if threading.active_count() <= count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{threading.active_count()} threads, {count} before")


async def test_close_does_not_wait_for_a_disk_that_hangs_and_gives_the_lock_up(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(file_module, "CLOSE_LIMIT_S", 0.05)
    async with opened(tmp_path) as bench:
        store, hang = bench.store, Hang()
        await bench.put(1)
        with faults(store, read=hang):
            reading = asyncio.create_task(bench.get(1))
            await hang.begun()
        with structlog.testing.capture_logs() as logs:
            await store.close()
        assert store.stuck
        assert [one["event"] for one in logs] == [
            "store threads hang and are abandoned",
            "arena memory stays mapped: a thread may still access it",
        ][:: -1 if logs[0]["event"].startswith("arena") else 1]
        again = FileBackend(tmp_path, PRINT, SIZE)
        await again.open()
        await again.close()
        assert store.files.slabs, "descriptors in use are not given to other files"
        hang.go.set()
        await reading
        while store.files.slabs:
            await asyncio.sleep(0.001)


# -- forks


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("how", ["closed", "killed"])
async def test_a_forked_child_does_not_keep_the_lock(tmp_path, how):
    """killed: the parent's descriptor goes without an unlock, as with SIGKILL."""
    store = FileBackend(tmp_path, PRINT, SIZE)
    await store.open()
    child = os.fork()
    if not child:
        signal.pause()
        os._exit(0)
    try:
        if how == "closed":
            await store.close()
        else:
            store.files.drop()
        again = FileBackend(tmp_path, PRINT, SIZE)
        for _ in range(500):  # the child may not have come to it yet
            try:
                await again.open()
                break
            except StoreError:
                again = FileBackend(tmp_path, PRINT, SIZE)
                await asyncio.sleep(0.02)
        else:
            raise AssertionError("the child keeps the lock")
        await again.close()
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)  # noqa: ASYNC222  (it was killed)
    await store.close()
