"""The thread that runs a store: its event loop, and the jobs in flight."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any

import anyio

from kvactors.errors import KVActorsError, StoreError
from kvactors.storage.backends.checked import CheckedBackend
from kvactors.storage.messages import Outcome
from kvactors.storage.slot_store import SlotStore
from kvactors.tier_cache.storage_jobs import StorageJob
from kvactors.tier_cache.views import ObjectMemory

LOADS, SAVES = 4, 2
"""Jobs of each kind that the store works on at a time."""

JobEnd = Callable[[StorageJob, Sequence[bool], Sequence[bytes]], None]
"""Called with a job, whether each of its keys is ok, and the names that left the store."""


class StorageLoop:
    """Runs jobs against a store. Every method but `run` is called on the loop.

    Args:
        make: makes the store.
        timeout: seconds that a call to the store may take.
        ended: called when a job has ended.

    Attributes:
        loop: the event loop, None before it runs.
        store: the store, None before it is made.
        generation: clears so far. Jobs of an earlier one are not done.
    """

    def __init__(self, make: Callable[[], SlotStore], timeout: float, ended: JobEnd) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.store: CheckedBackend | None = None
        self.generation = 0
        self._make = make
        self._timeout = timeout
        self._ended = ended
        self._loads: deque[StorageJob] = deque()
        self._saves: deque[StorageJob] = deque()
        self._running = {True: 0, False: 0}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop: asyncio.Future[float] | None = None

    def run(self, opened: Future[list[bytes]], limit: float) -> None:
        """Open the store, run its jobs and close it.

        Args:
            opened: receives the names of the store's objects, or a StoreError.
            limit: seconds that the store may take to open.
        """
        asyncio.run(self._run(opened, limit))

    async def _run(self, opened: Future[list[bytes]], limit: float) -> None:
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        try:
            self.store = store = CheckedBackend(self._make(), self._timeout)
            with anyio.fail_after(limit):
                await store.open()
        except BaseException as error:
            if self.store is not None:
                await self.store.close()
            known = isinstance(error, KVActorsError)
            opened.set_exception(
                error if known else StoreError(f"the store does not open: {error!r}")
            )
            return
        self.loop = loop
        opened.set_result(store.keys())
        await self._finish(await self._stop)
        await store.close()

    async def _finish(self, limit: float) -> None:
        """Wait for the jobs, then let those that wait fail."""
        until = time.monotonic() + limit
        while self._tasks and time.monotonic() < until:
            await asyncio.wait(self._tasks, timeout=until - time.monotonic())
        for job in (*self._loads, *self._saves):
            self._ended(job, [False] * len(job.keys), ())
        self._loads.clear()
        self._saves.clear()

    def stop(self, limit: float) -> None:
        """Begin to end. See `StorageTier.close`."""
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(limit)

    def accept(self, job: StorageJob) -> None:
        """Run a job when its turn comes."""
        (self._saves if job.save else self._loads).append(job)
        self._begin_jobs(job.save)

    def _begin_jobs(self, save: bool) -> None:
        lane, most = (self._saves, SAVES) if save else (self._loads, LOADS)
        while lane and self._running[save] < most:
            self._running[save] += 1
            self._start(self._run_job(lane.popleft()))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_job(self, job: StorageJob) -> None:
        ok, removed = [False] * len(job.keys), list[bytes]()
        try:
            if job.generation == self.generation and self.store is not None:
                removed = await self._move(self.store, job, ok)
        finally:
            self._running[job.save] -= 1
            self._begin_jobs(job.save)
            self._ended(job, ok, removed)

    async def _move(self, store: CheckedBackend, job: StorageJob, ok: list[bool]) -> list[bytes]:
        """Fill in `ok`. Returns the names that left the store."""
        memory: dict[int, ObjectMemory] = {}
        for i, region in enumerate(job.regions):
            try:
                memory[i] = ObjectMemory(region, store.block_bytes, writable=not job.save)
            except (TypeError, ValueError):
                continue  # a failure of this key
        names = [job.names[i] for i in memory]
        views = [one.view for one in memory.values()]
        if job.save:
            written = await store.write(names, views, lambda: time.monotonic() >= job.deadline)
            outcomes, removed = written.outcomes, written.evicted
        else:
            read = await store.read(names, views, lambda: time.monotonic() >= job.deadline)
            outcomes, removed = read.outcomes, read.gone
        for (i, one), outcome in zip(memory.items(), outcomes, strict=True):
            ok[i] = outcome == Outcome.OK or (job.save and outcome == Outcome.EXISTS)
            if ok[i] and not job.save:
                one.scatter()
        return [*removed, *self._removed_meanwhile(store)]

    @staticmethod
    def _removed_meanwhile(store: CheckedBackend) -> list[bytes]:
        """Names that the store lost outside of batches."""
        removed = store.inventory.take_removed()
        if removed:
            store.inventory.acknowledge_removed(removed)
        return removed

    def clear(self, generation: int) -> None:
        """Empty the store. Jobs from before are not done."""
        self.generation = generation
        if self.store is not None:
            self._start(self._clear(self.store))

    @staticmethod
    async def _clear(store: CheckedBackend) -> None:
        try:
            await store.clear()
        except StoreError:
            return  # logged. The store answers nothing until a clear has succeeded.
