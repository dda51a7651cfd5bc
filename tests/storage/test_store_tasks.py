"""Tasks of a file store end when the loop ends, on any disk."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

from kvactors.errors import StoreError
from kvactors.storage.file import store as file_module
from kvactors.storage.file.layout import SlabFiles
from kvactors.storage.file.store import FileBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import Bench
from tests.storage.helpers import OK, PRINT, SIZE, opened, whole

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


async def test_a_step_that_was_cancelled_alone_is_tried_again(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, "grow")
    async with opened(tmp_path) as bench:
        writing = asyncio.create_task(bench.put(1))
        while not disk.entered.is_set():
            await asyncio.sleep(0.001)
        next(task for task in asyncio.all_tasks() if "Growth._grow" in repr(task)).cancel()
        assert await writing == [Outcome.UNAVAILABLE]
        assert await bench.put(2) == [Outcome.UNAVAILABLE], "two calls grow the store at once"
        disk.answers.set()
        while not bench.store.medium.supply.growth._call.done():
            await asyncio.sleep(0.001)
        assert await bench.put(2) == [OK]


async def test_a_lock_that_is_replaced_again_and_again_is_an_error(tmp_path, monkeypatch):
    stat = os.fstat
    monkeypatch.setattr(
        os, "fstat", lambda fd: os.stat_result((*stat(fd)[:1], 1, *stat(fd)[2:]))
    )  # another file is at its path
    store = FileBackend(tmp_path, PRINT, SIZE, 4)
    with pytest.raises(StoreError, match="another file took its place 100 times"):
        await store.open()
    await store.close()


async def test_a_write_between_the_end_of_a_growth_and_its_callbacks_asks_for_another(tmp_path):
    """The slab of the one that is over may be full already: its answer, got without waiting, would
    be got again without end."""
    async with opened(tmp_path, capacity=8) as bench:
        growth = bench.store.medium.supply.growth
        first = asyncio.create_task(growth.more())
        while growth._task is None:
            await asyncio.sleep(0)
        growth._task.remove_done_callback(growth._ended)  # it runs in a later turn of the loop
        assert await first == OK
        assert growth._task.done()
        slabs = len(bench.store.files.slabs)
        assert await growth.more() == OK
        assert len(bench.store.files.slabs) == slabs + 1


# -- slabs ahead of their need


@pytest.fixture
def small_slabs(monkeypatch):
    """Eight slots each."""
    monkeypatch.setattr(file_module, "SLAB_BYTES", 8 * 8192)


async def grown(bench: Bench, slabs: int) -> None:
    """Wait until the store has a number of slabs, all of whose slots are known."""
    store = bench.store
    for _ in range(int(1000 * HANG)):
        if len(store.files.slabs) >= slabs and store.medium.supply.growth._task is None:
            break
        await asyncio.sleep(0.001)
    assert len(store.files.slabs) == slabs
    whole(store)


async def test_a_slab_of_which_less_than_half_is_free_is_followed_by_another(tmp_path, small_slabs):
    async with opened(tmp_path) as bench:
        await bench.put(*range(4))
        await grown(bench, 1)
        await bench.put(4)
        await grown(bench, 2)
        await bench.put(*range(5, 12))
        await grown(bench, 2)


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
            await asyncio.sleep(0.01)
        assert len(asked) == 1
        assert len(bench.store.keys()) == 8


async def test_a_store_that_is_closed_waits_for_the_slab_that_follows(
    tmp_path, monkeypatch, small_slabs
):
    disk = Disk(monkeypatch, "grow")
    disk.answers.set()
    async with opened(tmp_path) as bench:
        await bench.put(1)
        disk.answers.clear()
        asyncio.get_running_loop().call_later(0.1, disk.answers.set)
        await bench.put(*range(2, 7))
    assert disk.answered
    async with opened(tmp_path) as bench:
        assert len(bench.store.files.slabs) == 2
        assert len(bench.store.keys()) == 6
