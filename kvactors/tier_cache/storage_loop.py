"""A thread with an event loop for storage and sinks, and the jobs of a storage tier on it."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import anyio

from kvactors.errors import KVActorsError, StoreError
from kvactors.storage.backend import Backend
from kvactors.storage.guarded import GuardedBackend
from kvactors.storage.messages import Outcome
from kvactors.tier_cache.storage import (
    CLOSING,
    JobKind,
    KnownObjects,
    ObjectViews,
    StorageJob,
    StorageTier,
)


class Service(Protocol):
    """Something that runs on the loop."""

    async def open(self) -> None:
        """Begin to work. Nothing is left open if it raises."""

    async def close(self, limit: float) -> None:
        """Let work in flight end, for `limit` seconds at most, and release everything."""


class LoopThread:
    """Runs services on an event loop in a separate thread."""

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = tuple(services)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Future[float] | None = None

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def open(self, limit: float) -> None:
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.run(opened, limit)),
            name="kvactors-storage",
            daemon=True,
        )
        self._thread.start()
        try:
            opened.result(limit + CLOSING)
        except TimeoutError:
            raise StoreError(f"storage was not open after {limit} seconds") from None

    async def run(self, opened: Future[None], limit: float) -> None:
        """Open the services, and close them when `close` has been called. Runs in the thread."""
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        running: list[Service] = []
        try:
            with anyio.fail_after(limit):
                for service in self._services:
                    await service.open()
                    running.append(service)
        except BaseException as error:
            for service in reversed(running):
                await service.close(0.0)
            known = isinstance(error, KVActorsError)
            opened.set_exception(
                error if known else StoreError(f"storage does not open: {error!r}")
            )
            return
        self._loop = loop
        opened.set_result(None)
        left = await self._stop
        for service in reversed(running):
            until = loop.time() + left
            await service.close(left)
            left = max(0.0, until - loop.time())

    def call(self, work: Callable[..., object], *args: object) -> bool:
        """Run `work(*args)` on the loop. Returns False if there is none, or it has ended."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(work, *args)
        except RuntimeError:
            return False
        return True

    def close(self, limit: float) -> None:
        """Close the services and end the thread, in about `limit` seconds. Any number of times."""
        thread = self._thread
        if thread is None:
            return
        self.call(self.stop, limit)
        thread.join(limit + CLOSING)

    def stop(self, limit: float) -> None:
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(limit)

    def abandon(self) -> None:
        self._thread, self._loop = None, None


# -- the jobs of a storage tier


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
