"""Threads of a file store, and the reads and writes of its slots: native threads move objects, a
few threads make blocking calls of Python."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

import anyio

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.device.arena import Arena
from kvactors.native import SlabQueue
from kvactors.storage.backend import Expired
from kvactors.storage.file.layout import SlabFiles
from kvactors.storage.messages import Outcome
from kvactors.threads import NICE, Workers, atexit_close

T = TypeVar("T")

log = get_logger()

PYTHON_CALLS = 4
"""Calls of Python at the same time, at most: they open, scan and grow."""

DONE, DELETED = 0, 2
OUTCOMES = {DONE: Outcome.OK, 1: Outcome.CORRUPT, DELETED: Outcome.MISS, 3: Outcome.LATE}
"""By the number that the queue reports."""

DEADLINE_CHECK_S = 0.05
"""Seconds between two looks at the deadline of a job in flight."""


class SlabIo:
    """The threads of an open store: native ones move objects between its slots and memory, and a
    few make blocking calls of Python.

    A job is a batch of objects: one call submits it, and one wake-up of the loop completes all
    jobs that have ended since.

    Attributes:
        workers: the threads for calls of Python.
    """

    def __init__(self, files: SlabFiles, read_depth: int, write_depth: int) -> None:
        self.workers = Workers(min(read_depth, PYTHON_CALLS), "kvactors-file")
        self._files = files
        self._depths = (read_depth, write_depth)
        self._queue: SlabQueue | None = None
        self._slabs = 0  # that the queue has
        self._waiting: dict[int, asyncio.Future[tuple[list[int], bytes]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # which reads the queue's event
        atexit_close(self)

    def open(self) -> None:
        """The files are open, for the first time or again."""
        if self._queue is None:
            self._queue = SlabQueue(*self._depths, NICE)
        self._slabs = -1

    def attach(self, arena: Arena) -> None:
        self._opened().set_arena(arena.address, arena.nbytes, arena.stride)

    def _opened(self) -> SlabQueue:
        if self._queue is None:
            raise RuntimeError("the store is not open")
        return self._queue

    @property
    def in_flight(self) -> int:
        return 0 if self._queue is None else self._queue.in_flight

    @property
    def busy(self) -> int:
        return self.workers.busy + self.in_flight

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Make a blocking call and wait until it has ended, even if cancelled: the call works on
        memory that the caller lent."""
        return await self.workers.run(lambda: function(*args))

    async def read(
        self,
        slots: Sequence[int],
        views: Sequence[memoryview],
        marks: Sequence[bytes],
        expired: Expired,
    ) -> list[Outcome]:
        """Read objects and compare them with their marks and with the table: OK, MISS (the files
        were deleted), CORRUPT, UNAVAILABLE, or LATE if an object was not begun before the deadline.
        When the call has ended, cancelled or not, no view is written any more."""
        return (await self._move(False, slots, views, marks, expired))[0]

    async def write(
        self,
        slots: Sequence[int],
        views: Sequence[memoryview],
        entries: Sequence[bytes],
        expired: Expired,
    ) -> tuple[list[Outcome], bytes]:
        """Write payloads. Returns their outcomes, and their entries with the checksums, joined.
        When the call has ended, cancelled or not, no view is read any more."""
        return await self._move(True, slots, views, entries, expired)

    async def _move(
        self,
        writes: bool,
        slots: Sequence[int],
        views: Sequence[memoryview],
        records: Sequence[bytes],
        expired: Expired,
    ) -> tuple[list[Outcome], bytes]:
        direct = self._files.direct
        codes, done = await self._job(writes, direct, slots, views, records, expired)
        if direct and -errno.EINVAL in codes:
            # Refused by a call that began with it: the batch once more, through the page cache.
            self._files.buffered_from_now_on()
            codes, done = await self._job(writes, False, slots, views, records, expired)
        if not any(codes):
            return [Outcome.OK] * len(codes), done
        return [self._outcome(code) for code in codes], done

    def _outcome(self, code: int) -> Outcome:
        if code == DELETED:
            self._files.lose()
        if code >= 0:
            return OUTCOMES[code]
        return self._files.failed(OSError(-code, os.strerror(-code)))

    async def _job(
        self,
        writes: bool,
        direct: bool,
        slots: Sequence[int],
        views: Sequence[memoryview],
        records: Sequence[bytes],
        expired: Expired,
    ) -> tuple[list[int], bytes]:
        queue = self._current()
        number = queue.submit(writes, direct, list(slots), list(views), b"".join(records))
        future = self._future(queue, number)
        timer = future.get_loop().call_later(DEADLINE_CHECK_S, self._look, queue, number, expired)
        try:
            return await wait_uncancelled(future, lambda: queue.cancel(number))
        finally:
            timer.cancel()

    async def seal(self, entries: Sequence[tuple[int, bytes]], *, sync: bool) -> Outcome:
        """Write entries, by slot, after their payloads, all or none: OK, NO_SPACE, UNAVAILABLE, or
        MISS if the table was deleted.

        Args:
            sync: payloads and entries are on the device when the call has ended.
        """
        queue, (slots, parts) = self._current(), zip(*entries, strict=True)
        number = queue.seal(self._files.direct, sync, list(slots), b"".join(parts))
        codes, _ = await wait_uncancelled(self._future(queue, number))
        return self._outcome(codes[0])

    async def erase(self, slots: Sequence[int]) -> Outcome:
        """Free slots before new payloads are written there. If the disk refuses, their payloads
        must still match the old entries to be served."""
        if not slots:
            return Outcome.OK
        queue = self._current()
        codes, _ = await wait_uncancelled(self._future(queue, queue.erase(sorted(slots))))
        return self._outcome(codes[0])

    def _current(self) -> SlabQueue:
        """The queue, with the slabs that the store has now."""
        queue = self._opened()
        if self._slabs != len(self._files.slabs):
            self._files.bind(queue)  # the first slab decides how many slots one has
            queue.set_slabs(list(self._files.slabs))
            self._slabs = len(self._files.slabs)
        return queue

    def _future(self, queue: SlabQueue, number: int) -> asyncio.Future[tuple[list[int], bytes]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[tuple[list[int], bytes]] = loop.create_future()
        self._waiting[number] = future
        if self._loop is not loop:
            self._loop = loop
            loop.add_reader(queue.event_fd, self._collect, queue)
        return future

    def _look(self, queue: SlabQueue, number: int, expired: Expired) -> None:
        """Nothing more of a job is begun once its deadline has passed."""
        future = self._waiting.get(number)
        if future is None or future.done():
            return
        if expired():
            queue.cancel(number)
        else:
            future.get_loop().call_later(DEADLINE_CHECK_S, self._look, queue, number, expired)

    def _collect(self, queue: SlabQueue) -> None:
        for number, codes, records in queue.take_ended():
            future = self._waiting.pop(number, None)
            if future is None or future.done() or future.get_loop().is_closed():
                continue
            future.set_result((codes, records))
        if not self._waiting and self._loop is not None:
            self._loop.remove_reader(queue.event_fd)
            self._loop = None

    async def drained(self, limit: float) -> bool:
        """Wait until no job is in flight, at most `limit` seconds. Returns whether none is."""
        loop = asyncio.get_running_loop()
        waiting = [one for one in self._waiting.values() if one.get_loop() is loop]
        with anyio.move_on_after(limit):
            if waiting:
                await asyncio.wait(waiting)
        if self.in_flight:
            return False
        if self._queue is not None:  # jobs may have ended at the limit: the event is closed next
            self._collect(self._queue)
        return True

    async def close(self, limit: float) -> bool:
        """End the threads and close the files, which gives up the lock. Threads that hang for
        longer than `limit` seconds are abandoned, and the files stay open for them. Returns whether
        every call has ended."""
        began, files = now(), self._files
        ended = await self.workers.drained(limit)
        ended &= await self.drained(max(0.0, began + limit - now()))
        busy, queue, self._queue = self.busy, self._queue, None
        if ended:
            if queue is not None:
                await self.run(queue.close, limit)
            self.workers.close()
            files.close()
            return True
        log.warning("store threads hang and are abandoned", folder=str(files.folder), threads=busy)
        if queue is not None:
            self.workers.submit(lambda: queue.wait_idle(float("inf")))
            queue.close(0.0)
        self.workers.close()
        files.unlock()
        # A descriptor in use must not become another file's.
        self.workers.afterwards(files.drop)
        return False

    def end(self, limit: float) -> None:
        """The interpreter exits: writes must be complete first. See `threads.atexit_close`."""
        if self._queue is not None:
            self._queue.wait_idle(limit)
