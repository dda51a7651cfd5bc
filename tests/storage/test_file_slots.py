"""Slots of a file store: free, read, or in quarantine."""

from __future__ import annotations

import asyncio
import random

import anyio
import pytest

from kvactors.storage.backend import Expired
from kvactors.storage.catalog import Catalog
from kvactors.storage.file import slots as slots_module
from kvactors.storage.file import store as file_module
from kvactors.storage.file.slots import QUARANTINE_S, SlotSupply
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import Bench, key
from tests.storage.helpers import OK, SIZE, opened, whole
from tests.support.steps import run_unsuspended


class Supply(SlotSupply):
    """Slots on a disk that fails."""

    def __init__(self) -> None:
        super().__init__(None, None, Catalog())  # type: ignore[arg-type]

    async def grow(self, expired: Expired) -> Outcome:
        return Outcome.UNAVAILABLE


@pytest.fixture
def clock(monkeypatch):
    time = [0.0]
    monkeypatch.setattr(slots_module, "now", lambda: time[0])
    return time


def test_a_slot_that_is_read_becomes_free_when_its_last_reader_ends():
    slots = Supply()
    with slots.reading([1]):
        with slots.reading([1]):
            slots.give([1, 2])
            assert list(slots.free) == [2]
        assert list(slots.free) == [2]
    assert list(slots.free) == [2, 1]


def test_a_slot_in_quarantine_is_free_after_a_minute(clock):
    slots = Supply()
    slots.set_capacity(8)
    slots.quarantine(5)
    assert slots._catalog.capacity == 7, "what is in quarantine holds nothing"
    clock[0] += QUARANTINE_S - 1
    assert (slots.take_now(1), slots.quarantined) == ([], 1)
    clock[0] += 1
    assert (slots.take_now(1), slots._catalog.capacity) == ([5], 8)


def test_a_disk_that_fails_is_not_asked_to_evict(clock):
    async def squeeze() -> bool:
        raise AssertionError("evicted")

    found = run_unsuspended(Supply().take(squeeze, lambda: False))
    assert found == (None, Outcome.UNAVAILABLE)


# -- A file store within its capacity evicts and refuses nothing, although the disk is still busy with
# the slots of objects that are gone: their entries are being erased, or they are read once more.


@pytest.fixture(autouse=True)
def _small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs of four slots, so that a store has few of them beyond its capacity."""
    monkeypatch.setattr(file_module, "SLAB_BYTES", 4 * 8192)


def delay(bench: Bench, numbers: random.Random) -> None:
    """Let erasures and reads last longer than writes, some of them much longer."""
    io = bench.store.io

    def delayed(call):
        async def later(*args):
            found = await call(*args)
            if numbers.random() < 0.7:
                await asyncio.sleep(numbers.random() * 0.003)
            return found

        return later

    io.erase, io.read = delayed(io.erase), delayed(io.read)


class Client:
    """Writes only what fits beside the objects that it has not removed, and keeps their numbers.

    Attributes:
        live: numbers of objects in the store or being written.
        idle: those of them that no write has in flight.
    """

    def __init__(self, bench: Bench, capacity: int, numbers: random.Random) -> None:
        self.store, self.capacity, self.numbers = bench.store, capacity, numbers
        self.pattern = bench.pattern
        self.live: set[int] = set()
        self.idle: set[int] = set()
        self.next = 0

    async def put(self, chosen: list[int]) -> None:
        views = [memoryview(self.pattern(number)) for number in chosen]
        report = await self.store.write([key(n) for n in chosen], views, lambda: False)
        assert [*report.outcomes] == [OK] * len(chosen), "refused, although they fit"
        assert report.evicted == []
        self.idle.update(chosen)

    async def get(self, chosen: list[int]) -> None:
        views = [memoryview(bytearray(SIZE)) for _ in chosen]
        report = await self.store.read([key(n) for n in chosen], views, lambda: False)
        for number, view, outcome in zip(chosen, views, report.outcomes, strict=True):
            if outcome == OK:
                assert bytes(view) == self.pattern(number)
            else:
                assert number not in self.live

    def some(self, of: set[int]) -> list[int]:
        return self.numbers.sample(sorted(of), self.numbers.randint(0, len(of)))

    def step(self) -> asyncio.Task[None]:
        """Begin one call. Objects that it removes count as gone at once."""
        chance = self.numbers.random()
        if chance < 0.3:
            gone = self.some(self.idle)
            self.live.difference_update(gone)
            self.idle.difference_update(gone)
            return asyncio.create_task(self.store.remove([key(n) for n in gone]))
        if chance < 0.6:
            return asyncio.create_task(self.get(self.some(self.idle)))
        count = self.numbers.randint(0, self.capacity - len(self.live))
        fresh = [*range(self.next, self.next + count)]
        self.next += count
        self.live.update(fresh)
        return asyncio.create_task(self.put(fresh))


@pytest.mark.parametrize("seed", range(12))
async def test_what_fits_is_stored_and_costs_no_other_object(tmp_path, seed):
    numbers = random.Random(seed)
    capacity = numbers.choice([1, 2, 3, 4, 7, 12])
    async with opened(tmp_path, capacity) as bench:
        delay(bench, numbers)
        client, tasks = Client(bench, capacity, numbers), set()
        for _ in range(150):
            tasks.add(client.step())
            if numbers.random() < 0.5:
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        await asyncio.gather(*tasks)
        await client.get(sorted(client.live))
        assert bench.store.count() == len(client.live)
        whole(bench.store)


def hold(bench: Bench, call: str) -> asyncio.Event:
    """No call of this kind ends before the event."""
    go, io = asyncio.Event(), bench.store.io
    done = getattr(io, call)

    async def waiting(*args):
        await go.wait()
        return await done(*args)

    setattr(io, call, waiting)
    return go


@pytest.mark.parametrize("call", ["erase", "read"])
async def test_a_write_waits_for_a_slot_until_its_deadline(tmp_path, call):
    async with opened(tmp_path, 4) as bench:
        go, busy = hold(bench, call), []
        for first in (0, 4):  # the second four are in the slab beyond the capacity
            chosen = [*range(first, first + 4)]
            assert await bench.put(*chosen) == [OK] * 4
            if call == "read":
                views = [memoryview(bytearray(SIZE)) for _ in chosen]
                reading = bench.store.read([key(n) for n in chosen], views, lambda: False)
                busy.append(asyncio.create_task(reading))
                await asyncio.sleep(0)
            busy.append(asyncio.create_task(bench.store.remove([key(n) for n in chosen])))
            await asyncio.sleep(0)
        looks = iter(range(4))
        with anyio.fail_after(20.0):
            late = await bench.put(8, expired=lambda: next(looks, None) is None)
        assert late == [Outcome.LATE]
        writing = asyncio.create_task(bench.put(9))
        cancelled = asyncio.create_task(bench.put(10))
        await asyncio.sleep(0.01)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert not writing.done()
        go.set()
        assert await writing == [OK]
        await asyncio.gather(*busy)
        whole(bench.store)
