"""The native reads and writes of a file store: short and interrupted calls, errors of single objects,
deadlines, cancellation, and memory that is not aligned."""

from __future__ import annotations

import asyncio
import errno
import threading

import numpy as np
import pytest
import xxhash

from kvactors.native import SlabQueue, xxh3_64
from kvactors.storage.backends.slab_files import runs_of
from kvactors.storage.backends.slab_table import Meta, blank_entries, blank_entry, entry_of, mark_of
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import key, never
from tests.storage.helpers import CORRUPT, MISS, OK, PRINT, SIZE, opened, whole
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
        slot, mark = bench.store.medium.objects[key(1)]
        meta = bench.store.files.meta
        raw = bench.store.files.entry(slot)
        checksum = xxhash.xxh3_64_intdigest(bench.pattern(1))
        assert raw == entry_of(meta, key(1), checksum, 0, 0, {1: raw[116:124]})
        assert mark == mark_of(raw)


def test_entries_of_slots_apart_are_not_joined():
    entries = [(3, b"a"), (4, b"b"), (6, b"c"), (5, b"d"), (7, b"e"), (8, b"f")]
    assert list(runs_of(entries)) == [(3, b"ab"), (6, b"c"), (5, b"d"), (7, b"ef")]
    assert list(runs_of([])) == []


# -- calls that do less than they were asked


async def test_short_calls_go_on_where_they_ended(tmp_path):
    def short(_fd, _at, size):
        return 4096 if size > 4096 else None

    async with opened(tmp_path) as bench:
        with faults(bench.store, read=short, write=short):
            assert await bench.put(*range(8)) == [OK] * 8
            assert await bench.get(*range(8)) == [OK] * 8
        assert await bench.get(*range(8)) == [OK] * 8


async def test_interrupted_calls_are_made_again(tmp_path):
    calls = []

    def interrupted(*call):
        calls.append(call)
        return -errno.EINTR if len(calls) % 2 else None

    async with opened(tmp_path) as bench:
        with faults(bench.store, read=interrupted, write=interrupted):
            assert await bench.put(1, 2) == [OK] * 2
            assert await bench.get(1, 2) == [OK] * 2


async def test_a_write_that_moves_nothing_is_a_full_disk(tmp_path):
    async with opened(tmp_path) as bench:
        with faults(bench.store, write=lambda *_: 0):
            assert await bench.put(1) == [NO_SPACE]
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
            free = bench.store.medium.supply.slots.free
            bench.store.medium.supply.slots.free = type(free)(sorted(free))
            with faults(bench.store, write=refuse):
                assert await bench.put(*slots) == [OK, OK, UNAVAILABLE, OK, OK, OK]
            assert await bench.get(*slots) == [OK, OK, MISS, OK, OK, OK]
        whole(bench.store)


async def test_a_table_that_cannot_be_read_costs_no_object(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1, 2)
        table = bench.store.files._table
        with faults(bench.store, read=lambda fd, *_: -errno.EIO if fd == table else None):
            assert await bench.get(1, 2) == [UNAVAILABLE] * 2
        assert "Input/output error" in bench.store.trouble()
        assert await bench.get(1, 2) == [OK] * 2


async def test_a_table_that_ends_early_makes_the_objects_behind_it_corrupt(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1, 2)
        meta, table = bench.store.files.meta, bench.store.files._table

        def cut(fd, at, _size):
            return max(0, 4096 + meta.entry_bytes - at) if fd == table else None

        with faults(bench.store, read=cut):
            assert await bench.get(1, 2) == [OK, CORRUPT]


async def test_another_table_at_the_path_is_a_miss(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1)
        with faults(bench.store, inode=lambda: 1):
            assert await bench.get(1) == [MISS]


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
    begun, go, writes = threading.Event(), threading.Event(), []
    async with opened(tmp_path, depth=1, size=300 << 10) as bench:

        def hang(_fd, at, _size):
            writes.append(at)
            begun.set()
            go.wait(60)

        with faults(bench.store, write=hang):
            writing = asyncio.create_task(bench.put(*range(4)))
            while not begun.is_set():
                await asyncio.sleep(0.001)
            writing.cancel()
            await asyncio.sleep(0)
            assert not writing.done()
            go.set()
            with pytest.raises(asyncio.CancelledError):
                await writing
        assert len(writes) == 1
        whole(bench.store)
        assert await bench.put(*range(4)) == [OK] * 4


async def test_a_thread_that_hangs_does_not_delay_other_jobs(tmp_path):
    begun, go = threading.Event(), threading.Event()
    async with opened(tmp_path, depth=2) as bench:
        await bench.put(1, 2)
        table = bench.store.files._table

        def hang(fd, at, _size):
            if fd != table and at == 0:
                begun.set()
                go.wait(60)

        views = bench.views(2)
        with faults(bench.store, read=hang):
            stuck = asyncio.create_task(bench.store.read([key(1)], views[:1], never))
            while not begun.is_set():
                await asyncio.sleep(0.001)
            for _ in range(20):
                found = await bench.store.read([key(2)], views[1:], never)
                assert list(found.outcomes) == [OK]
            go.set()
            assert list((await stuck).outcomes) == [OK]


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


async def test_jobs_that_do_not_fit_are_refused(tmp_path):
    async with opened(tmp_path) as bench:
        await bench.put(1)
        queue, mark, view = bench.store.threads.io._queue, bytes(16), bench.views(1)
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


def test_blank_entries_have_no_checksums():
    meta = Meta(PRINT.hex(), SIZE, STRIDE, 10)
    blank, full = blank_entry(meta, key(1), 2, 3), entry_of(meta, key(1), 4, 2, 3)
    assert blank[88:96] == blank[-8:] == bytes(8)
    assert blank[:88] + blank[96:-8] == full[:88] + full[96:-8]


def test_blank_entries_of_a_batch_are_those_of_single_objects():
    meta, fields = Meta(PRINT.hex(), SIZE, STRIDE, 10), {1: b"12345678", 7: b"abc"}
    keys = [key(i) for i in (5, 0, 9)]
    assert blank_entries(meta, keys, 1 << 40, 3, fields) == [
        blank_entry(meta, one, (1 << 40) + n, 3, fields) for n, one in enumerate(keys)
    ]
