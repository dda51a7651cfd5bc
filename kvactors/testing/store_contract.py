"""Conformance suite of storage back ends: subclass `StoreContract`, implement `make`, and let
pytest (with pytest-asyncio, in either mode) collect the class.

    class TestMyStore(StoreContract):
        async def make(self, folder, capacity):
            return MyStore(folder, FINGERPRINT, self.block_bytes, capacity)
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.storage.backend import Backend
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.messages import Outcome
from kvactors.testing import asyncio_marks

GOOD = (Outcome.OK, Outcome.EXISTS)

CALL_LIMIT = 60.0
"""Seconds that a call to a store may take here."""


def key(number: int) -> bytes:
    """A name."""
    return number.to_bytes(8, "big") + bytes(24)


def never() -> bool:
    """A deadline that does not come."""
    return False


class Bench:
    """An open store and host slots to move blocks from and to."""

    def __init__(self, store: Backend, arena: Arena) -> None:
        self.store = store
        self.arena = arena

    def pattern(self, number: int) -> bytes:
        return (
            np.random.default_rng(number)
            .integers(0, 256, self.store.block_bytes, np.uint8)
            .tobytes()
        )

    def views(self, count: int, first: int = 0) -> list[memoryview]:
        return [self.arena.view(first + i) for i in range(count)]

    def filled(self, numbers: Sequence[int], first: int = 0) -> list[memoryview]:
        views = self.views(len(numbers), first)
        for view, number in zip(views, numbers, strict=True):
            view[:] = self.pattern(number)
        return views

    async def put(self, *numbers: int, expired: Any = never) -> list[int]:
        keys = [key(n) for n in numbers]
        return list((await self.store.write(keys, self.filled(numbers), expired)).outcomes)

    async def get(self, *numbers: int, expired: Any = never) -> list[int]:
        """Read blocks. Returns one outcome a block. Blocks that are OK hold the right bytes."""
        views = self.views(len(numbers))
        for view in views:
            view[:] = bytes(len(view))
        outcomes = list((await self.store.read([key(n) for n in numbers], views, expired)).outcomes)
        for view, number, outcome in zip(views, numbers, outcomes, strict=True):
            assert outcome != Outcome.OK or bytes(view) == self.pattern(number), (
                f"wrong bytes of {number}"
            )
        return outcomes

    async def found(self, *numbers: int) -> int:
        keys = [key(n) for n in numbers]
        run = self.store.probe(keys)
        return await self.store.ask(keys, never) if run is None else run


class StoreContract(ABC):
    """block_bytes: of the stores that `make` makes. evicts: whether a store of limited capacity
    evicts by itself, least recently used first."""

    block_bytes = 5000
    evicts = True
    pytestmark = asyncio_marks()

    @abstractmethod
    async def make(self, folder: Path, capacity: int) -> Backend:
        """A store, not open yet. folder: for what it keeps. capacity: objects at most, 0 for no
        limit."""

    @asynccontextmanager
    async def opened(self, folder: Path, capacity: int = 0) -> AsyncIterator[Bench]:
        store = await self.make(folder, capacity)
        arena = Arena(64, self.block_bytes, trailer=store.slot_trailer_bytes)
        await store.open()
        try:
            await store.attach(arena)
            yield Bench(store, arena)
        finally:
            await store.close()
            arena.close()

    async def test_written_objects_are_read_and_results_are_per_key(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            assert await bench.put(1, 2, 3) == [Outcome.OK] * 3
            found, lacking = Outcome.OK, Outcome.MISS
            assert await bench.get(1, 9, 3, 8, 2) == [found, lacking, found, lacking, found]

    async def test_probes_report_the_leading_run(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            await bench.put(*range(10))
            assert await bench.found(*range(10)) == 10
            assert await bench.found(0, 1, 99, 2) == 2
            assert await bench.found(99) == 0
            assert await bench.found() == 0

    async def test_present_objects_stay_unchanged(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            await bench.put(1)
            assert (await bench.put(1, 2))[0] in GOOD
            assert await bench.get(1, 2) == [Outcome.OK] * 2

    async def test_removed_objects_are_misses(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            await bench.put(1, 2)
            await bench.store.remove([key(1), key(77)])
            assert await bench.get(1, 2) == [Outcome.MISS, Outcome.OK]
            assert await bench.put(1) == [Outcome.OK]
            assert await bench.get(1) == [Outcome.OK]

    async def test_clear_removes_everything_and_objects_being_written(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            await bench.put(1, 2)
            writing = asyncio.create_task(bench.put(*range(10, 30)))
            await asyncio.sleep(0)
            await bench.store.clear()
            await writing
            await bench.store.clear()
            assert await bench.found(1) == 0
            assert await bench.get(1, 2, 10, 29) == [Outcome.MISS] * 4
            assert await bench.put(1) == [Outcome.OK]
            assert await bench.get(1) == [Outcome.OK]

    async def test_nothing_from_before_a_clear_is_found_after_it(self, tmp_path: Path) -> None:
        """With several writers in flight, as the storage actors use it, in this process and after a
        reopen."""
        for attempt, pause in enumerate((0.0, 0.0005, 0.003)):
            folder = tmp_path / str(attempt)
            numbers = range(100, 132)
            async with self.opened(folder) as bench:
                store = GuardedBackend(bench.store, CALL_LIMIT)
                await bench.put(1, 2)
                views = bench.filled(numbers, 8)
                batches = [range(at, at + 8) for at in range(0, 32, 8)]
                writing = [
                    asyncio.create_task(
                        store.write([key(100 + i) for i in some], [views[i] for i in some], never)
                    )
                    for some in batches
                ]
                await asyncio.sleep(pause)
                await store.clear()
                assert bench.store.generation == 1
                assert await bench.found(1) == await bench.found(100) == 0
                await asyncio.gather(*writing)
                assert await bench.get(1, 2, *numbers) == [Outcome.MISS] * 34
                assert await bench.put(1) == [Outcome.OK]
            async with self.opened(folder) as bench:
                assert Outcome.OK not in await bench.get(2, *numbers)

    async def test_a_clear_of_a_salt_leaves_the_other_objects(self, tmp_path: Path) -> None:
        """In a store that keeps salts, in this process and after a reopen. An object whose salt is
        not known is counted."""
        async with self.opened(tmp_path) as bench:
            store = GuardedBackend(bench.store, CALL_LIMIT)
            if store.shares is None:
                return
            await bench.store.write(
                [key(n) for n in range(3)], bench.filled(range(3)), never, (), [7, 8, None]
            )
            assert await store.forget(7) == 1
            assert await bench.found(0) == 0
            assert await bench.get(0, 1, 2) == [Outcome.MISS, Outcome.OK, Outcome.OK]
        async with self.opened(tmp_path) as bench:
            assert await bench.get(0) == [Outcome.MISS]

    async def test_a_clear_that_fails_is_an_error_and_nothing_is_found_until_one_succeeds(
        self, tmp_path: Path
    ) -> None:
        """The seam around every back end sees to it."""
        async with self.opened(tmp_path) as bench:
            store, clear = GuardedBackend(bench.store, CALL_LIMIT), bench.store.clear
            await bench.put(1)

            async def refuse(generation: int = 0) -> None:
                raise OSError(5, f"generation {generation} refused")

            bench.store.clear = refuse  # type: ignore[method-assign]
            try:
                await store.clear()
            except StoreError as error:
                failure = str(error)
            else:
                failure = ""
            assert "could not be cleared" in failure
            view = bench.filled([2])
            assert store.probe([key(1)]) == 0
            read = await store.read([key(1)], bench.views(1, 1), never)
            assert list(read.outcomes) == [Outcome.MISS]
            refused = await store.write([key(2)], view, never)
            assert list(refused.outcomes) == [Outcome.UNAVAILABLE]
            bench.store.clear = clear  # type: ignore[method-assign]
            assert list((await store.write([key(2)], view, never)).outcomes) == [Outcome.OK]
            assert await bench.get(1, 2) == [Outcome.MISS, Outcome.OK]

    async def test_a_deadline_leaves_the_rest_late(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path) as bench:
            assert await bench.put(1, 2, expired=lambda: True) == [Outcome.LATE] * 2
            assert await bench.get(1) == [Outcome.MISS]
            await bench.put(1)
            assert await bench.get(1, expired=lambda: True) == [Outcome.LATE]

    async def test_a_full_store_evicts_the_least_recently_used(self, tmp_path: Path) -> None:
        """The report lists the evicted keys. No key of a batch is evicted for the same batch."""
        if not self.evicts:
            return
        async with self.opened(tmp_path, 8) as bench:
            await bench.put(*range(8))
            await bench.found(0)
            views = bench.views(2)
            report = await bench.store.write([key(8), key(9)], views, never)
            assert report.evicted == [key(1), key(2)]
            assert await bench.get(0, 1, 3) == [Outcome.OK, Outcome.MISS, Outcome.OK]
            outcomes = await bench.put(*range(20, 30))
            assert set(outcomes[:2]) <= {Outcome.REFUSED, Outcome.NO_SPACE}
            assert outcomes[2:] == [Outcome.OK] * 8
            kept = [key(i) for i in range(22, 30)]
            listed = [one for part in bench.store.key_slices() for one in part]
            assert sorted(bench.store.keys()) == sorted(listed) == kept

    async def test_slots_are_left_alone_once_a_call_has_ended_cancelled_or_not(
        self, tmp_path: Path
    ) -> None:
        """A cancelled call may have taken effect or not, but accesses no memory later."""
        async with self.opened(tmp_path) as bench:
            await bench.put(*range(20))
            for pause in (0.0, 0.0005, 0.002):
                reading = asyncio.create_task(
                    bench.store.read([key(i) for i in range(20)], bench.views(20), never)
                )
                await asyncio.sleep(pause)
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                self._mark(bench.views(20))
                await asyncio.sleep(0.02)
                assert all(bytes(view) == b"\xee" * len(view) for view in bench.views(20))
                writing = asyncio.create_task(bench.put(*range(100, 120)))
                await asyncio.sleep(pause)
                writing.cancel()
                await asyncio.gather(writing, return_exceptions=True)
                self._mark(bench.views(20))
                for number in range(100, 120):
                    assert (await bench.get(number))[0] in (Outcome.OK, Outcome.MISS)
                await bench.store.remove([key(i) for i in range(100, 120)])

    @staticmethod
    def _mark(views: Sequence[memoryview]) -> None:
        for view in views:
            view[:] = b"\xee" * len(view)

    async def test_many_at_once_see_whole_objects_only(self, tmp_path: Path) -> None:
        async with self.opened(tmp_path, 16 if self.evicts else 0) as bench:

            async def writer(first: int) -> None:
                for round_ in range(6):
                    numbers = [(first + round_ * 3 + i) % 40 for i in range(8)]
                    views = bench.filled(numbers, 8 * (first // 10))
                    await bench.store.write([key(n) for n in numbers], views, never)

            async def reader(first: int) -> None:
                views = bench.views(8, 32 + 8 * (first // 10))
                for round_ in range(12):
                    numbers = [(first + round_ * 5 + i) % 40 for i in range(8)]
                    report = await bench.store.read([key(n) for n in numbers], views, never)
                    for view, number, outcome in zip(views, numbers, report.outcomes, strict=True):
                        assert outcome in (Outcome.OK, Outcome.MISS)
                        assert outcome != Outcome.OK or bytes(view) == bench.pattern(number)

            await asyncio.gather(
                *(writer(i * 10) for i in range(4)), *(reader(i * 10) for i in range(4))
            )
            assert bench.store.statistics().corrupt == 0
