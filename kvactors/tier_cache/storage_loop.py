"""Jobs of a storage tier, on the event loop that runs its store."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any

from kvactors.errors import StoreError
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

    def __init__(self, tier: StorageTier) -> None:
        self.store: GuardedBackend | None = None
        self.known = KnownObjects()
        self.clearing = 0
        self._tier = tier
        self._waiting: dict[JobKind, deque[StorageJob]] = {kind: deque() for kind in MOST}
        self._running: dict[JobKind, int] = dict.fromkeys(MOST, 0)
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self.store = store = GuardedBackend(self._tier.make(), self._tier.timeout)
        try:
            await store.open()
            if self._tier.memory is not None:
                await store.attach(self._tier.memory)
        except BaseException:
            await store.close()
            raise
        lists = store.inner.lists_keys
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
        memory: dict[int, ObjectMemory] = {}
        for i, region in enumerate(job.regions):
            try:
                memory[i] = ObjectMemory(region, store.block_bytes, writable=not save)
            except (TypeError, ValueError):
                continue  # a failure of this key
        names = [job.names[i] for i in memory]
        views = [one.view for one in memory.values()]
        if save:
            written = await store.write(names, views, lambda: self._tier.clock() >= job.deadline)
            outcomes, removed = written.outcomes, written.evicted
        else:
            read = await store.read(names, views, lambda: self._tier.clock() >= job.deadline)
            outcomes, removed = read.outcomes, read.gone
        for (i, one), outcome in zip(memory.items(), outcomes, strict=True):
            ok[i] = outcome == Outcome.OK or (save and outcome == Outcome.EXISTS)
            if ok[i] and not save:
                one.scatter()
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


# -- Memory of one object: a view, or several that follow one another (a scatter list).


class ObjectMemory:
    """The memory of one object as one contiguous view.

    Attributes:
        view: contiguous bytes. Of a scatter list it is a copy, or new memory if `writable`.
    """

    def __init__(self, region: ObjectViews, block_bytes: int, *, writable: bool) -> None:
        parts = [region] if isinstance(region, memoryview) else list(region)
        self._parts = [_flat(part, writable) for part in parts]
        size = sum(part.nbytes for part in self._parts)
        if size != block_bytes:
            raise ValueError(f"memory of {size} bytes for an object of {block_bytes}")
        if len(self._parts) == 1:
            self.view = self._parts[0]
        else:
            self.view = memoryview(bytearray(block_bytes))
            if not writable:
                self._copy(to_parts=False)

    def scatter(self) -> None:
        """The object's bytes are in `view`: copy them to the views of a scatter list."""
        if len(self._parts) > 1:
            self._copy(to_parts=True)

    def _copy(self, *, to_parts: bool) -> None:
        start = 0
        for part in self._parts:
            whole = self.view[start : start + part.nbytes]
            if to_parts:
                part[:] = whole
            else:
                whole[:] = part
            start += part.nbytes


def _flat(part: object, writable: bool) -> memoryview:
    view = memoryview(part)  # type: ignore[arg-type]
    if not view.contiguous or (writable and view.readonly):
        raise ValueError("the memory of an object must be contiguous, and writable for a load")
    return view.cast("B") if view.nbytes else memoryview(b"")
