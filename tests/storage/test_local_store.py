"""`LocalStore` over objects in a dict: batches, the keys that it lists, and its slices of time."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.storage import local_store
from kvactors.storage.backend import StoreCounters
from kvactors.storage.memory import MemoryBackend
from kvactors.storage.messages import Outcome
from tests.support.steps import run_unsuspended

A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")
SIZE = 4


class Bench(MemoryBackend):
    """Calls succeed, but for the keys in `fails`."""

    def __init__(self) -> None:
        super().__init__(b"", SIZE)
        self.fails: dict[bytes, Outcome] = {}
        self.found_since: set[bytes] = set()
        self.on_save = lambda key: None

    async def load(self, key, into):
        return self.fails[key] if key in self.fails else await super().load(key, into)

    async def save(self, key, data):
        self.on_save(key)
        return self.fails[key] if key in self.fails else await super().save(key, data)

    def present(self, key):
        return key in self.found_since

    async def each(self, work):
        for item in work:
            await item()

    def put(self, *keys: bytes, expired=lambda: False):
        views = [memoryview(bytes([key[0]]) * SIZE) for key in keys]
        report = run_unsuspended(self.write(keys, views, expired))
        return list(report.outcomes), report.evicted

    def get(self, *keys: bytes, expired=lambda: False):
        views = [memoryview(bytearray(SIZE)) for _ in keys]
        report = run_unsuspended(self.read(keys, views, expired))
        return list(report.outcomes), report.gone, [bytes(view) for view in views]


def test_a_write_that_fails_leaves_no_key():
    bench = Bench()
    bench.fails[A] = Outcome.NO_SPACE
    assert bench.put(A, B)[0] == [Outcome.NO_SPACE, Outcome.OK]
    assert bench.keys() == [B]
    assert bench.pending == set()


def test_an_error_of_the_medium_leaves_no_key():
    bench = Bench()

    def fail(key):
        if key == B:
            raise OSError("disk")

    bench.on_save = fail
    with pytest.raises(OSError, match="disk"):
        bench.put(A, B)
    assert bench.keys() == []
    assert bench.pending == set()


def test_a_key_is_not_readable_while_it_is_written():
    bench, seen = Bench(), []
    bench.on_save = lambda key: seen.append((bench.probe([A]), bench.keys()))
    bench.put(A)
    assert seen == [(0, [])]
    assert bench.probe([A]) == 1


def test_an_object_cleared_while_it_is_written_is_erased():
    bench = Bench()
    bench.on_save = lambda key: bench.catalog.clear()
    assert bench.put(A)[0] == [Outcome.REFUSED]
    assert bench.objects == {}


def test_corrupt_and_missing_objects_leave_the_store():
    bench = Bench()
    bench.put(A, B, C, D)
    bench.fails[A] = Outcome.CORRUPT
    del bench.objects[B], bench.objects[C]
    bench.found_since.add(C)
    outcomes, gone, _ = bench.get(A, B, C, D)
    assert outcomes == [Outcome.CORRUPT, Outcome.MISS, Outcome.MISS, Outcome.OK]
    assert gone == [A, B], "C was written again since it was read"
    assert set(bench.objects) == {D}


# -- keys


def test_keys_that_are_being_written_are_not_listed():
    owned = Bench()
    owned.catalog.admit([A, B])
    owned.pending.add(B)
    assert owned.keys() == [A]
    assert (owned.count(), owned.holds(A), owned.holds(B)) == (1, True, False)
    assert owned.readable_run([A, B]) == 1
    assert owned.readable_run([B, A]) == 0


def test_removed_keys_are_returned_once_unless_they_are_back(monkeypatch):
    monkeypatch.setattr(local_store, "REMOVED_PAGE", 1)
    owned = Bench()
    owned.catalog.admit([A, B, C])
    owned.catalog.remove([A, B, C])
    owned.catalog.admit([B])
    owned.acknowledge_removed([C])
    assert owned.take_removed() == [A]
    assert owned.take_removed() == []


# -- counters


def test_every_outcome_is_counted_in_its_field():
    counters = StoreCounters()
    counters.read(bytes(Outcome))
    counters.written(bytes([Outcome.OK] * 2))
    counters.evicted = 3
    found = counters.statistics(7, 4096)
    assert found[:5] == (7, 4096, 1, 2, 1)
    assert found[5:11] == (1, 1, 1, 1, 1, 3)
    assert (found.breaker, found.faults, found.refused) == ("closed", 0, 1)


# -- slices


async def runs_beside(batch):
    """Await a batch. Returns how often another task ran since its start."""
    count, ended = 0, False

    async def other():
        nonlocal count
        while not ended:
            count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    try:
        await batch
    finally:
        ended = True
        await task
    return count


async def test_objects_are_moved_in_slices(monkeypatch):
    monkeypatch.setattr(local_store, "SLICE_S", -1.0)  # every object ends a slice
    store, count = MemoryBackend(b"", 4), 64
    keys = [number.to_bytes(32, "big") for number in range(count)]
    views = [memoryview(bytearray(4)) for _ in keys]
    assert await runs_beside(store.write(keys, views, lambda: False)) >= count
    assert await runs_beside(store.read(keys, views, lambda: False)) >= count
