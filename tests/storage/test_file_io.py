"""The native reads and writes of a file store: short and interrupted calls, errors of single objects,
deadlines, cancellation, and memory that is not aligned."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import resource
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvactors.native import SlabQueue, xxh3_64
from kvactors.storage.file import layout
from kvactors.storage.file.io import SlabIo
from kvactors.storage.file.table import mark_of
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import key, never
from tests.storage.helpers import CORRUPT, MISS, OK, SIZE, Hang, entry_of, opened, whole
from tests.support.slab_calls import faults

STRIDE = 8192
LATE, UNAVAILABLE, NO_SPACE = Outcome.LATE, Outcome.UNAVAILABLE, Outcome.NO_SPACE


@pytest.mark.parametrize("plain", [False, True])
def test_checksums_are_those_of_xxhash(plain):
    data = np.random.default_rng(1).bytes(5000)
    for size in (*range(300), 511, 512, 513, 1023, 1024, 1025, 2048, 4095, 4096, 5000):
        assert xxh3_64(data[:size], plain) == xxhash.xxh3_64_intdigest(data[:size]), size


async def test_entries_are_completed_as_the_table_format_has_them(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1)
        slot, mark = bench.store.objects[key(1)]
        meta = bench.store.files.meta
        raw = bench.store.files.entry(slot)
        checksum = xxhash.xxh3_64_intdigest(bench.pattern(1))
        assert raw == entry_of(meta, key(1), checksum, 0, 0, {1: raw[116:124]})
        assert mark == mark_of(raw)


# -- writes of the table


def entries_of(store, *slots: int) -> list[tuple[int, bytes]]:
    """Entries that no payload belongs to: slots, and bytes that name them."""
    return [(slot, bytes([slot + 1]) * store.files.meta.entry_bytes) for slot in slots]


async def test_entries_of_slots_side_by_side_are_one_call_and_the_others_are_apart(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1)  # makes the slab
        store, calls = bench.store, []
        size = store.files.meta.entry_bytes
        wanted = entries_of(store, 3, 4, 6, 5, 7, 8)

        def counted(_fd: int, at: int, count: int) -> None:
            calls.append(((at - 4096) // size, count // size))

        with faults(store, write=counted):
            assert await store.io.seal(wanted, sync=False) == OK
        assert calls == [(3, 2), (6, 1), (5, 1), (7, 2)]
        assert [(slot, store.files.entry(slot)) for slot, _ in wanted] == wanted
        await store.io.erase([8, 3, 6])
        left = {slot for slot, _ in wanted if any(store.files.entry(slot))}
        assert left == {4, 5, 7}


async def test_payloads_are_synced_before_entries_are_written_and_entries_afterwards(tmp_path):
    async with opened(tmp_path, durability="synced") as bench:
        await bench.put(1)
        table, steps = bench.store.files._table, []

        def written(fd: int, _at: int, _size: int) -> None:
            steps.append("entry" if fd == table else "payload")

        def synced(fd: int) -> int:
            steps.append("sync of the table" if fd == table else "sync of the slab")
            return 0

        with faults(bench.store, write=written, sync=synced):
            assert await bench.put(2) == [OK]
        assert steps == ["payload", "sync of the slab", "entry", "sync of the table"]


@pytest.mark.parametrize("inode", [1, -errno.EIO], ids=["moved", "not found now"])
async def test_entries_are_not_written_to_a_table_that_is_not_in_its_place(tmp_path, inode):
    async with opened(tmp_path) as bench:
        await bench.put(1)
        with faults(bench.store, inode=lambda: inode):
            assert await bench.put(2) == [UNAVAILABLE]
        moved = inode > 0
        assert ("deleted or moved" in bench.store.trouble()) == moved
        assert bench.store.keys() == ([] if moved else [key(1)])
        if not moved:
            whole(bench.store)


async def test_a_table_write_that_is_cut_short_goes_on_and_one_without_space_does_not(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1)
        table = bench.store.files._table
        with faults(bench.store, write=lambda fd, *_: 100 if fd == table else None):
            assert await bench.put(2, 3) == [OK, OK]
        with faults(bench.store, write=lambda fd, *_: 0 if fd == table else None):
            assert await bench.put(4) == [NO_SPACE]
        assert await bench.get(1, 2, 3, 4) == [OK, OK, OK, MISS]


async def test_table_writes_wait_for_no_transfer(tmp_path):
    """Every thread of the payloads hangs."""
    async with opened(tmp_path, depth=1) as bench:
        await bench.put(1)
        table = bench.store.files._table
        hang = Hang(lambda fd, *_: fd != table)
        with faults(bench.store, write=hang):
            stuck = asyncio.ensure_future(bench.put(2))
            try:
                await bench.store.io.erase([5])
                assert not stuck.done()
            finally:
                hang.go.set()
            assert await stuck == [OK]


async def test_table_writes_of_slots_or_entries_that_do_not_fit_are_refused(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1)
        queue, size = bench.store.io._current(), bench.store.files.meta.entry_bytes
        slots = len(bench.store.files.slabs) * bench.store.files.meta.slots_per_slab
        for slot in (-1, slots):
            with pytest.raises(ValueError, match="out of range"):
                queue.erase([slot])
            with pytest.raises(ValueError, match="out of range"):
                queue.seal(True, False, [slot], bytes(size))
        with pytest.raises(ValueError, match="wrong length"):
            queue.seal(True, False, [0], bytes(size - 1))
        assert queue.in_flight == 0


# -- calls that do less than they were asked


LARGE = (5 << 19) + 100
"""Bytes of an object that takes three calls."""


@pytest.mark.parametrize("size", [SIZE, LARGE])
@pytest.mark.parametrize("answers", [[4096], [(1 << 20) - 4096], [-errno.EINTR, None]])
async def test_calls_that_are_cut_short_or_interrupted_go_on(tmp_path, size, answers):
    following = itertools.cycle(answers)

    def less(*_):
        return next(following)

    async with opened(tmp_path, size=size) as bench:
        with faults(bench.store, read=less, write=less):
            assert await bench.put(1, 2) == [OK] * 2
            assert await bench.get(1, 2) == [OK] * 2
        assert await bench.get(1, 2) == [OK] * 2


@pytest.mark.parametrize("call", [0, 1, 2])
async def test_a_device_that_refuses_one_direct_call_of_an_object_gets_buffered_ones(
    tmp_path, call
):
    """A last piece may be no multiple of a device's blocks. The object is then neither
    corrupt nor refused as beyond the space."""
    async with opened(tmp_path, size=LARGE) as bench:
        await bench.put(0)
        files = bench.store.files
        table = files._table
        files.direct = True

        def refuse(fd, at, _size):
            refused = files.direct and fd != table and at % files.meta.stride == call << 20
            return -errno.EINVAL if refused else None

        with faults(bench.store, read=refuse, write=refuse):
            assert await bench.get(0) == [OK]
            assert not files.direct
            files.direct = True
            assert await bench.put(1) == [OK]
        assert await bench.get(0, 1) == [OK] * 2
        whole(bench.store)


# -- errors of single objects


@pytest.mark.parametrize("direction", ["read", "write"])
async def test_objects_of_a_run_that_the_disk_refuses_fail_alone(tmp_path, direction):
    """Several objects are moved by one call. If it fails, each is moved alone."""
    async with opened(tmp_path) as bench:
        slots = range(6)
        await bench.put(*slots)
        table = bench.store.files._table

        def refuse(fd, at, size):
            bad = fd != table and at <= 2 * STRIDE < at + size
            return -errno.EIO if bad else None

        if direction == "read":
            with faults(bench.store, read=refuse):
                assert await bench.get(*slots) == [OK, OK, UNAVAILABLE, OK, OK, OK]
            assert await bench.get(*slots) == [OK] * 6
        else:
            await bench.store.remove([key(i) for i in slots])
            free = bench.store.supply.free
            bench.store.supply.free = type(free)(sorted(free))
            with faults(bench.store, write=refuse):
                assert await bench.put(*slots) == [OK, OK, UNAVAILABLE, OK, OK, OK]
            assert await bench.get(*slots) == [OK, OK, MISS, OK, OK, OK]
        whole(bench.store)


async def test_a_table_that_ends_early_makes_the_objects_behind_it_corrupt(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1, 2)
        meta, table = bench.store.files.meta, bench.store.files._table

        def cut(fd, at, _size):
            return max(0, 4096 + meta.entry_bytes - at) if fd == table else None

        with faults(bench.store, read=cut):
            assert await bench.get(1, 2) == [OK, CORRUPT]


# -- deadlines and cancellation


async def test_objects_that_were_not_begun_before_the_deadline_are_late(tmp_path):
    """The only thread hangs in the first object while the deadline passes."""
    begun, go = threading.Event(), threading.Event()
    async with opened(tmp_path, depth=1, size=300 << 10) as bench:
        await bench.put(*range(3))
        table, checked = bench.store.files._table, []

        def hang(fd, _at, _size):
            if fd != table and not begun.is_set():
                begun.set()
                go.wait(60)

        def expired():
            if begun.is_set():
                checked.append(None)
            return begun.is_set()

        with faults(bench.store, read=hang):
            reading = asyncio.create_task(bench.get(*range(3), expired=expired))
            for _ in range(30_000):
                if checked:
                    break
                await asyncio.sleep(0.001)
            go.set()
            assert await reading == [OK, LATE, LATE]
        assert await bench.get(*range(3)) == [OK] * 3


async def test_a_cancelled_write_ends_early_and_leaks_nothing(tmp_path):
    writes = []
    hang = Hang(lambda _fd, at, _size: writes.append(at) or True)
    async with opened(tmp_path, depth=1, size=300 << 10) as bench:
        with faults(bench.store, write=hang):
            writing = asyncio.create_task(bench.put(*range(4)))
            await hang.begun()
            writing.cancel()
            await asyncio.sleep(0)
            assert not writing.done()
            hang.go.set()
            with pytest.raises(asyncio.CancelledError):
                await writing
        assert len(writes) == 1
        whole(bench.store)
        assert await bench.put(*range(4)) == [OK] * 4


# -- memory


async def test_memory_that_is_not_aligned_goes_through_a_bounce_buffer(tmp_path):
    async with opened(tmp_path) as bench:
        memory = memoryview(bytearray(SIZE + 9))
        memory[5 : 5 + SIZE] = bench.pattern(1)
        views = [memory[5 : 5 + SIZE]]
        assert list((await bench.store.write([key(1)], views, never)).outcomes) == [OK]
        assert await bench.get(1) == [OK]
        memory[:] = bytes(SIZE + 9)
        assert list((await bench.store.read([key(1)], views, never)).outcomes) == [OK]
        assert bytes(memory) == bytes(5) + bench.pattern(1) + bytes(4)


WRITE = """
import asyncio, pathlib, sys
from kvactors.storage.file.store import FileBackend

async def main():
    store = FileBackend(pathlib.Path(sys.argv[1]), bytes(32), 5000, 4)
    await store.open()
    memory = memoryview(bytearray(b"x" * 5009))
    print((await store.write([bytes(32)], [memory[5:5005]], lambda: False)).outcomes[0])
    await store.close()

asyncio.run(main())
"""


def test_no_other_memory_of_the_process_reaches_the_disk(tmp_path):
    """The C library fills memory that it gives out, here as a long-lived process has filled it.
    Prompts of other tenants may have been there."""
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    filled = {**os.environ, "MALLOC_PERTURB_": "90"}
    done = subprocess.run(command, env=filled, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
    [slab] = tmp_path.rglob("slab-*")
    slot = slab.read_bytes()[:STRIDE]
    assert slot == b"x" * 5000 + bytes(STRIDE - 5000)


async def test_jobs_that_do_not_fit_are_refused(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1)
        queue, mark, view = bench.store.io._queue, bytes(16), bench.views(1)
        for slots, views, records in (
            ([0, 1], view, mark * 2),
            ([0], view, mark[1:]),
            ([-1], view, mark),
            ([1 << 40], view, mark),
            ([0], [memoryview(bytearray(SIZE - 1))], mark),
        ):
            with pytest.raises(ValueError, match=r"differ|records|slot|smaller"):
                queue.submit(False, True, slots, views, records)
        with pytest.raises(BufferError):
            queue.submit(False, True, [0], [memoryview(bytes(SIZE))], mark)
        assert queue.in_flight == 0


def test_a_queue_refuses_sizes_and_jobs_after_its_close():
    with pytest.raises(ValueError, match="threads"):
        SlabQueue(0, 1, 0)
    queue = SlabQueue(1, 1, 0)
    with pytest.raises(ValueError, match="sizes"):
        queue.bind(0, 0, b"", 0, 0, 0, 4096, 192, 1)
    assert queue.close(1.0)
    with pytest.raises(RuntimeError, match="closed"):
        queue.submit(False, False, [], [], b"")


async def test_jobs_that_end_at_the_limit_of_a_close_are_answered(tmp_path, monkeypatch):
    """The event that tells of them is closed next, and its number may become another file's."""
    hang = Hang()
    async with opened(tmp_path) as bench:
        await bench.put(1)
        io = bench.store.io
        queue = io._queue

        def at_the_limit(_):  # the job ends here, and the loop does not see it
            hang.go.set()
            assert queue.wait_idle(60)
            return queue.in_flight

        with faults(bench.store, read=hang):
            reading = asyncio.create_task(bench.store.read([key(1)], bench.views(1), never))
            await hang.begun()
            monkeypatch.setattr(SlabIo, "in_flight", property(at_the_limit))
            assert await io.drained(0.01)
            assert not asyncio.get_running_loop().remove_reader(queue.event_fd)
            assert list((await reading).outcomes) == [OK]


# -- A file store of many slabs leaves descriptors to the process, and works with those that it holds
# and those that it opens for a call.


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def few_descriptors(more: int):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def held(monkeypatch):
    """Slabs that stay open."""
    monkeypatch.setattr(layout, "HELD_SLABS", 4)
    return 4


async def test_a_store_that_began_with_one_object_grows_with_few_descriptors(tmp_path, held):
    async with opened(tmp_path, capacity=1) as bench:
        await bench.put(0)
    async with opened(tmp_path, capacity=60, durability="synced") as bench:
        with few_descriptors(30):
            assert set(await bench.put(*range(60))) <= {OK, Outcome.EXISTS}
            assert await bench.get(*range(60)) == [OK] * 60
        assert len(bench.store.files.slabs) == 60
        whole(bench.store)
    with few_descriptors(30):
        async with opened(tmp_path, capacity=60) as bench:
            assert await bench.get(*range(60)) == [OK] * 60


async def test_slabs_beyond_those_held_are_reckoned_shrunk_and_closed(tmp_path, held):
    before = descriptors()
    async with opened(tmp_path, capacity=1) as bench:
        await bench.put(0)
    async with opened(tmp_path, capacity=10) as bench:
        await bench.put(*range(10))
        assert bench.store.files.own_bytes() >= 10 * SIZE
        assert (
            bench.store.files.own_bytes()
            == 10 * (bench.store.files.folder / "slab-0009").stat().st_blocks * 512
        )
        (bench.store.files.folder / "slab-0009").unlink()
        answers = await bench.get(*range(10))
        assert sorted(answers)[:9] == [OK] * 9
        assert len(list(bench.store.files.folder.glob("slab-*"))) == 9, (
            "a slab that was deleted is not made anew by a read"
        )
    async with opened(tmp_path, capacity=2) as bench:
        assert len(list(bench.store.files.folder.glob("slab-*"))) == len(bench.store.files.slabs)
    assert descriptors() == before
