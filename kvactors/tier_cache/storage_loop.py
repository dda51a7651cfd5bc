"""Jobs of a storage tier, on the event loop that runs its store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from kvactors.errors import StoreError
from kvactors.storage.backend import Backend
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.messages import Outcome
from kvactors.tier_cache.storage import JobKind, KnownObjects, ObjectViews, StorageJob, StorageTier

MOST: dict[JobKind, int] = {"load": 4, "store": 2, "lookup": 2}
"""Jobs of each kind that the store works on at a time."""


class StorageLoop:
    """Runs jobs against a store. A `Service`: every method is called on the loop.

    Attributes:
        known: the objects known since the last clear that has begun. Other jobs are not done.
    """

    def __init__(self, tier: StorageTier, make: Callable[[], Backend]) -> None:
        self.store: GuardedBackend | None = None
        self.known = KnownObjects()
        self.clearing = 0
        self._tier, self._make = tier, make
        self._waiting: dict[JobKind, deque[StorageJob]] = {kind: deque() for kind in MOST}
        self._running: dict[JobKind, int] = dict.fromkeys(MOST, 0)
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self.store = store = GuardedBackend(self._make(), self._tier.timeout)
        try:
            await store.open()
            if self._tier.memory is not None:
                await store.attach(self._tier.memory)
        except BaseException:
            await store.close()
            raise
        lists = store.is_complete
        self.known = KnownObjects(store.keys() if lists else (), lists=lists)

    async def close(self, limit: float) -> None:
        """Wait for the jobs, then let those that wait fail, and close the store."""
        now = asyncio.get_running_loop().time
        until = now() + limit
        while self._tasks and (left := until - now()) > 0:
            await asyncio.wait(self._tasks, timeout=left)
        for jobs in self._waiting.values():
            for job in jobs:
                self._tier.ended(job, [False] * len(job.keys), [])
            jobs.clear()
        if self.store is not None:
            await self.store.close()

    # -- jobs

    def accept(self, job: StorageJob) -> None:
        self._waiting[job.kind].append(job)
        self._begin_jobs(job.kind)

    def _begin_jobs(self, kind: JobKind) -> None:
        waiting = self._waiting[kind]
        while waiting and self._running[kind] < MOST[kind]:
            self._running[kind] += 1
            self._start(self._run_job(waiting.popleft()))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_job(self, job: StorageJob) -> None:
        ok, removed, gone = [False] * len(job.keys), list[bytes](), list[bytes]()
        try:
            if job.known is self.known and self.store is not None:
                if job.kind == "lookup":
                    ok = await self._look_up(self.store, job)
                else:
                    removed = await self._move(self.store, job, ok)
                gone = job.known.ended(job, ok, removed)
        finally:
            self._running[job.kind] -= 1
            self._begin_jobs(job.kind)
            self._tier.ended(job, ok, gone)

    async def _look_up(self, store: GuardedBackend, job: StorageJob) -> list[bool]:
        if self.known.lists:
            return [store.holds(name) for name in job.names]
        return await store.exists_many(job.names, lambda: self._tier.clock() >= job.deadline)

    async def _move(self, store: GuardedBackend, job: StorageJob, ok: list[bool]) -> list[bytes]:
        """Fill in `ok`. Returns the names that left the store."""
        save = job.kind == "store"
        parts: dict[int, list[memoryview]] = {}
        for i, region in enumerate(job.regions):
            if found := _parts_of(region, store.block_bytes, writable=not save):
                parts[i] = found
        names = [job.names[i] for i in parts]
        views = [  # contiguous: of a scatter list a copy, or new memory for its bytes
            each[0]
            if len(each) == 1
            else memoryview(bytearray().join(each) if save else bytearray(store.block_bytes))
            for each in parts.values()
        ]
        if save:
            written = await store.write(names, views, lambda: self._tier.clock() >= job.deadline)
            outcomes, removed = written.outcomes, written.evicted
        else:
            read = await store.read(names, views, lambda: self._tier.clock() >= job.deadline)
            outcomes, removed = read.outcomes, read.gone
        for i, view, outcome in zip(parts, views, outcomes, strict=True):
            ok[i] = outcome == Outcome.OK or (save and outcome == Outcome.EXISTS)
            if ok[i] and not save and len(parts[i]) > 1:
                _scatter(view, parts[i])
        meanwhile = store.take_removed()  # lost outside of batches
        if meanwhile:
            store.acknowledge_removed(meanwhile)
        return [*removed, *meanwhile]

    def remove(self, names: Sequence[bytes]) -> None:
        if self.store is not None:
            self._start(self.store.remove(names))

    # -- clears

    def clear(self) -> None:
        """Empty the store. Jobs from before are not done."""
        self.known = self._tier.known
        if self.store is not None:
            self.clearing += 1
            self._start(self._clear(self.store))

    async def _clear(self, store: GuardedBackend) -> None:
        try:
            await store.clear()
        except StoreError:
            return  # logged. The store answers nothing until a clear has succeeded.
        finally:
            self.clearing -= 1


def _parts_of(region: ObjectViews, block_bytes: int, *, writable: bool) -> list[memoryview]:
    """The views of an object's memory, as bytes. Empty if it is not memory for an object."""
    try:
        parts = [region] if isinstance(region, memoryview) else region
        views: list[memoryview] = [memoryview(part) for part in parts]
        if not all(view.contiguous and not (writable and view.readonly) for view in views):
            return []
        found = [view.cast("B") if view.nbytes else memoryview(b"") for view in views]
    except (TypeError, ValueError):
        return []
    return found if sum(view.nbytes for view in found) == block_bytes else []


def _scatter(whole: memoryview, parts: Sequence[memoryview]) -> None:
    start = 0
    for part in parts:
        part[:] = whole[start : start + part.nbytes]
        start += part.nbytes
