"""OwnedBatches over a medium that is a dict."""

from __future__ import annotations

import pytest

from kvactors.storage.backend import StoreCounters
from kvactors.storage.catalog import OwnedInventory
from kvactors.storage.local_store import OwnedBatches
from kvactors.storage.messages import Outcome
from tests.support.steps import run_unsuspended

A, B, C, D = (bytes([letter]) * 32 for letter in b"abcd")
SIZE = 4


class DictMedium:
    """Calls succeed, but for the keys in `fails`."""

    def __init__(self) -> None:
        self.objects: dict[bytes, bytes] = {}
        self.fails: dict[bytes, Outcome] = {}
        self.sealed = Outcome.OK
        self.abandoned: set[bytes] = set()
        self.evicted: list[bytes] = []
        self.found_since: set[bytes] = set()
        self.on_save = lambda key: None

    async def load(self, key, into):
        if key in self.fails:
            return self.fails[key]
        if key not in self.objects:
            return Outcome.MISS
        into[:] = self.objects[key]
        return Outcome.OK

    async def save(self, key, data):
        self.on_save(key)
        if key in self.fails:
            return self.fails[key]
        self.objects[key] = bytes(data)
        return Outcome.OK

    async def seal(self, keys):
        return self.sealed

    def abandon(self, keys):
        self.abandoned |= set(keys)

    async def erase(self, keys):
        for key in keys:
            self.objects.pop(key, None)

    def take_evicted(self):
        evicted, self.evicted = self.evicted, []
        return evicted

    def present(self, key):
        return key in self.found_since

    async def each(self, work):
        for item in work:
            await item()


class Bench:
    """Batches with at most `capacity` objects."""

    def __init__(self, capacity: int = 0) -> None:
        self.medium, self.inventory = DictMedium(), OwnedInventory(capacity)
        self.counters = StoreCounters()
        self.batches = OwnedBatches(self.medium, self.inventory, self.counters, SIZE)

    def write(self, *keys: bytes, expired=lambda: False):
        views = [memoryview(bytes([key[0]]) * SIZE) for key in keys]
        report = run_unsuspended(self.batches.write(keys, views, expired))
        return list(report.outcomes), report.evicted

    def read(self, *keys: bytes, expired=lambda: False):
        views = [memoryview(bytearray(SIZE)) for _ in keys]
        report = run_unsuspended(self.batches.read(keys, views, expired))
        return list(report.outcomes), report.gone, [bytes(view) for view in views]


def test_written_objects_are_read_back():
    bench = Bench()
    assert bench.write(A, B) == ([Outcome.OK] * 2, [])
    outcomes, gone, views = bench.read(A, B)
    assert (outcomes, gone, views) == ([Outcome.OK] * 2, [], [b"aaaa", b"bbbb"])
    assert bench.batches.probe([A, B, C]) == 2


def test_objects_in_the_store_are_not_written_again():
    bench = Bench()
    bench.write(A)
    assert bench.write(A, B) == ([Outcome.EXISTS, Outcome.OK], [])


def test_the_least_recently_used_object_is_evicted_and_erased():
    bench = Bench(capacity=2)
    bench.write(A, B)
    bench.batches.probe([A])
    assert bench.write(C) == ([Outcome.OK], [B])
    assert set(bench.medium.objects) == {A, C}
    assert bench.counters.evicted == 1


def test_a_batch_larger_than_the_store_is_refused_in_part():
    outcomes, _ = Bench(capacity=2).write(A, B, C)
    assert sorted(outcomes) == sorted([Outcome.OK, Outcome.OK, Outcome.REFUSED])


def test_keys_not_begun_by_the_deadline_are_late_and_not_in_the_store():
    bench = Bench()
    assert bench.write(A, expired=lambda: True) == ([Outcome.LATE], [])
    assert bench.inventory.keys() == []
    bench.write(B)
    assert bench.read(B, expired=lambda: True)[0] == [Outcome.LATE]
    assert bench.inventory.keys() == [B]


class Groups:
    """Calls of a `DictMedium`, a batch each."""

    def __init__(self, medium: DictMedium) -> None:
        self.medium, self.calls = medium, []

    async def load_group(self, keys, into, expired):
        self.calls.append(list(keys))
        return [await self.medium.load(key, view) for key, view in zip(keys, into, strict=True)]

    async def save_group(self, keys, data, expired):
        self.calls.append(list(keys))
        return [await self.medium.save(key, view) for key, view in zip(keys, data, strict=True)]


def test_a_batch_is_one_call_and_each_object_has_an_outcome():
    bench = Bench()
    groups = Groups(bench.medium)
    bench.batches = OwnedBatches(bench.medium, bench.inventory, bench.counters, SIZE, groups)
    bench.write(A)
    bench.medium.fails[D] = Outcome.NO_SPACE
    assert bench.write(A, B, D, C)[0] == [Outcome.EXISTS, Outcome.OK, Outcome.NO_SPACE, Outcome.OK]
    bench.medium.fails[B] = Outcome.CORRUPT
    outcomes, gone, views = bench.read(A, B, C)
    assert groups.calls == [[A], [B, D, C], [A, B, C]]
    assert (outcomes, gone) == ([Outcome.OK, Outcome.CORRUPT, Outcome.OK], [B])
    assert (views[0], views[2]) == (b"aaaa", b"cccc")
    assert bench.read(A, C, expired=lambda: True)[0] == [Outcome.LATE] * 2
    short = [memoryview(bytearray(SIZE)), memoryview(bytearray(1)), memoryview(bytearray(SIZE))]
    report = run_unsuspended(bench.batches.read([A, A, C], short, lambda: False))
    assert list(report.outcomes) == [Outcome.OK, Outcome.REFUSED, Outcome.OK]
    assert groups.calls[3:] == [[A, C]]


def test_a_write_that_fails_leaves_no_key():
    bench = Bench()
    bench.medium.fails[A] = Outcome.NO_SPACE
    assert bench.write(A, B)[0] == [Outcome.NO_SPACE, Outcome.OK]
    assert bench.inventory.keys() == [B]
    assert bench.inventory.pending == set()


def test_a_batch_that_is_not_sealed_leaves_no_key():
    bench = Bench()
    bench.medium.sealed = Outcome.UNAVAILABLE
    assert bench.write(A, B)[0] == [Outcome.UNAVAILABLE] * 2
    assert bench.inventory.keys() == []


def test_an_error_of_the_medium_leaves_no_key_and_abandons_the_payloads():
    bench = Bench()

    def fail(key):
        if key == B:
            raise OSError("disk")

    bench.medium.on_save = fail
    with pytest.raises(OSError, match="disk"):
        bench.write(A, B)
    assert bench.inventory.keys() == []
    assert bench.inventory.pending == set()
    assert bench.medium.abandoned == {A, B}


def test_a_key_is_not_readable_while_it_is_written():
    bench, seen = Bench(), []
    bench.medium.on_save = lambda key: seen.append(
        (bench.batches.probe([A]), bench.inventory.keys())
    )
    bench.write(A)
    assert seen == [(0, [])]
    assert bench.batches.probe([A]) == 1


def test_an_object_cleared_while_it_is_written_is_erased():
    bench = Bench()
    bench.medium.on_save = lambda key: bench.inventory.catalog.clear()
    assert bench.write(A)[0] == [Outcome.REFUSED]
    assert bench.medium.objects == {}


def test_corrupt_and_missing_objects_leave_the_store():
    bench = Bench()
    bench.write(A, B, C, D)
    bench.medium.fails[A] = Outcome.CORRUPT
    del bench.medium.objects[B], bench.medium.objects[C]
    bench.medium.found_since.add(C)
    outcomes, gone, _ = bench.read(A, B, C, D)
    assert outcomes == [Outcome.CORRUPT, Outcome.MISS, Outcome.MISS, Outcome.OK]
    assert gone == [A, B], "C was written again since it was read"
    assert set(bench.medium.objects) == {D}


def test_removal_spares_objects_that_are_being_written():
    bench = Bench()
    bench.write(A, B)
    bench.inventory.pending.add(B)
    run_unsuspended(bench.batches.remove([A, B]))
    assert set(bench.medium.objects) == {B}


def test_a_taken_key_is_erased_when_it_is_removed():
    bench = Bench()
    bench.write(A)
    bench.inventory.take([A])
    assert A in bench.medium.objects
    run_unsuspended(bench.batches.remove([A]))
    assert bench.medium.objects == {}


def test_a_clear_erases_everything():
    bench = Bench()
    bench.write(A, B)
    run_unsuspended(bench.batches.clear())
    assert bench.medium.objects == {}
    assert bench.inventory.keys() == []
