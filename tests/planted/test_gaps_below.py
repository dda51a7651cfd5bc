"""Tests that the planted bugs asked for, of copies, stores and ranks: without them a bug of
`bugs/data_plane.txt` went unnoticed."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from kvactors.data_plane.base import Direction
from kvactors.data_plane.engine import _report
from kvactors.data_plane.ranks.connection import MemoryConnection, check_leader
from kvactors.data_plane.ranks.leader import RankGroup
from kvactors.data_plane.ranks.plane import RanksPlane, RankStore
from kvactors.data_plane.ranks.protocol import Identity, RankAnswer, StoreObjects
from kvactors.device.arena import Arena
from kvactors.identity import StoreIdentity
from kvactors.settings.ranks import RanksConfig, Secret
from kvactors.storage.file.store import FileBackend
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.loop import simulate
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


# -- ranks


SCOPE = StoreIdentity("model", "default", bytes(32), 0, 1)


async def introduce(theirs) -> None:
    """Send a rank's messages up to its admission."""
    assert await check_leader(theirs, Secret(""))
    theirs.send(Identity(0, 1, "model", "default", "none", bytes(32), 4, 4))


class Answers(RankGroup):
    """A group whose ranks give preset answers."""

    healthy = True

    def __init__(self, *answers) -> None:
        super().__init__(RanksConfig(count=len(answers)), SCOPE, 4, 4)
        self.answers = [
            None if outcomes is None else RankAnswer(1, bytes(outcomes)) for outcomes in answers
        ]
        self.asked = []

    async def scatter(self, build, arrived=None, **_how):
        self.asked.append(build(1))
        return self.answers


@pytest.mark.parametrize("bad", range(3))
async def test_a_copy_is_as_good_as_its_worst_rank(bad):
    answers = [[0, 0, 0] for _ in range(3)]
    answers[bad] = [0, 1, 0]
    plane = RanksPlane(Answers(*answers), None, None, store_timeout=1.0)
    assert await plane.copy_pairs(Direction.TO_HOST, [1, 2, 3], [4, 5, 6]) == (1,)


@pytest.mark.parametrize("bad", range(3))
async def test_an_object_is_as_good_as_its_worst_share(bad):
    answers = [[Outcome.OK, Outcome.OK] for _ in range(3)]
    answers[bad] = [Outcome.OK, Outcome.MISS]
    store = RankStore(Answers(*answers), 64, 1.0, exclusive=False)
    report = await store.read_slots([bytes(32), bytes([1]) * 32], None, [0, 1], lambda: False)
    assert list(report.outcomes) == [Outcome.OK, Outcome.MISS]


async def test_nothing_is_written_beside_objects_that_could_not_be_cleared():
    """A rank that was away keeps what the others have cleared, until it is cleared as well."""
    group = Answers([Outcome.OK], None)
    store = RankStore(group, 64, 1.0, exclusive=False)
    await store.clear()
    report = await store.write_slots([bytes(32)], None, [0], lambda: False)
    assert list(report.outcomes) == [Outcome.UNAVAILABLE]
    assert [one.kind for one in group.asked] == ["clear", "clear"]
    group.answers[1] = group.answers[0]
    report = await store.write_slots([bytes(32)], None, [0], lambda: False)
    assert list(report.outcomes) == [Outcome.OK]
    assert [one.kind for one in group.asked] == ["clear", "clear", "clear", "write"]


def test_requests_to_a_silent_rank_stay_open_until_it_answers():
    """It may have stopped in the middle of a copy: those blocks stay unused until it reports the
    end of the copy."""

    async def main() -> None:
        group = RankGroup(RanksConfig(count=1, timeout_s=0.5), SCOPE, 4, 4)
        ours, theirs = MemoryConnection.pair()
        meeting = asyncio.create_task(group.accept(ours))
        await introduce(theirs)
        await theirs.receive()
        asked = asyncio.create_task(
            group.scatter(lambda op: StoreObjects(op, "remove"), outcomes=0)
        )
        message = await theirs.receive()
        await asyncio.sleep(100.0)
        assert group.statistics()[0].health == "silent"
        assert group.statistics()[0].in_flight == 1
        assert not asked.done()
        assert await group.scatter(lambda op: StoreObjects(op, "clear"), outcomes=1) == [None]
        theirs.send(RankAnswer(message.op, b""))
        assert [answer is None for answer in await asked] == [False]
        assert group.healthy
        theirs.close()
        await meeting

    simulate(main)


def test_requests_to_a_failed_rank_have_ended_when_it_is_back():
    """It sends Hello when no earlier work is in flight, and no other component answers for it."""

    async def main() -> None:
        group = RankGroup(RanksConfig(count=1, timeout_s=0.5), SCOPE, 4, 4)
        meetings, asked = [], None
        for life in range(2):
            ours, theirs = MemoryConnection.pair()
            meetings.append(asyncio.create_task(group.accept(ours)))
            await introduce(theirs)
            await theirs.receive()
            if life == 0:
                asked = asyncio.create_task(
                    group.scatter(lambda op: StoreObjects(op, "remove"), outcomes=0)
                )
                await theirs.receive()
                theirs.close()
                await asyncio.sleep(10.0)
                assert not asked.done()
        assert await asked == [None]
        assert group.healthy
        theirs.close()
        await asyncio.gather(*meetings)

    simulate(main)
