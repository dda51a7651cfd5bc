"""Tests that the planted bugs asked for, of copies and stores: without them a bug of
`bugs/data_plane.txt` went unnoticed."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

from kvactors.data_plane.engine import _report
from kvactors.device.arena import Arena
from kvactors.storage.file.store import FileBackend
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import key, never
from tests.support.slab_calls import faults


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


# -- copies


def test_a_layer_is_there_when_all_its_pieces_are():
    loop = asyncio.new_event_loop()
    pieces = [[loop.create_future() for _ in range(3)] for _ in range(2)]
    said = []

    async def steps() -> None:
        _report(said.append, [range(2), range(2, 5)], pieces)
        for group in reversed(pieces):
            for piece in group:
                assert said == []
                piece.set_result(True)
                await asyncio.sleep(0)

    loop.run_until_complete(steps())
    loop.close()
    assert said == [5]


# -- stores


async def test_nothing_is_found_before_it_is_written():
    store, release = MemoryBackend(bytes(32), 8), asyncio.Event()
    save = store.save

    async def slow(key, data):
        await release.wait()
        return await save(key, data)

    store.save = slow
    await store.open()
    writing = asyncio.create_task(
        store.write([bytes(32)], [memoryview(bytearray(8))], lambda: False)
    )
    await asyncio.sleep(0)
    assert store.probe([bytes(32)]) == 0
    release.set()
    await writing
    assert store.probe([bytes(32)]) == 1
    await store.close()


async def test_a_rotten_object_is_gone_with_the_first_look():
    store = MemoryBackend(bytes(32), 8)
    await store.open()
    view = memoryview(bytearray(8))
    await store.write([key(1)], [view], never)
    store.objects[key(1)] = (b"rotten!!", store.objects[key(1)][1])
    report = await store.read([key(1)], [view], never)
    assert list(report.outcomes) == [Outcome.CORRUPT]
    assert report.gone == [key(1)]
    assert store.probe([key(1)]) == 0
    assert not store.holds(key(1))
    await store.close()


@asynccontextmanager
async def slow_files(folder):
    """A file store with one object. A read of it lasts until `shut` is empty."""
    store, arena, shut, begun = FileBackend(folder, bytes(32), 5000), Arena(4, 5000), [True], []
    await store.open()
    await store.attach(arena)
    arena.view(0)[:] = b"a" * 5000
    await store.write([key(1)], [arena.view(0)], never)

    def slowly(_fd, at, _size):
        begun.append(at)
        while shut:
            time.sleep(0.001)

    try:
        with faults(store, read=slowly):
            yield store, arena, shut, begun
    finally:
        shut.clear()
        await store.close()
        arena.close()


async def test_a_cancelled_read_has_ended_when_it_returns(tmp_path):
    """Its slot may be given to another object from then on."""
    async with slow_files(tmp_path) as (store, arena, shut, begun):
        reading = asyncio.create_task(store.read([key(1)], [arena.view(1)], never))
        await until(lambda: begun)
        reading.cancel()
        await asyncio.sleep(0.02)
        assert not reading.done()
        shut.clear()
        await asyncio.gather(reading, return_exceptions=True)
        arena.view(1)[:] = b"x" * 5000
        await asyncio.sleep(0.02)
        assert bytes(arena.view(1)) == b"x" * 5000


async def test_an_object_removed_during_a_read_keeps_its_place_until_the_end(tmp_path):
    async with slow_files(tmp_path) as (store, arena, shut, begun):
        reading = asyncio.create_task(store.read([key(1)], [arena.view(1)], never))
        await until(lambda: begun)
        await store.remove([key(1)])
        slot = begun[0] // store.files.meta.stride
        assert slot not in store.supply.free
        arena.view(2)[:] = b"b" * 5000
        report = await store.write([key(2)], [arena.view(2)], never)
        assert list(report.outcomes) == [Outcome.OK]
        assert store.objects[key(2)][0] != slot
        shut.clear()
        await reading
        assert slot in store.supply.free
