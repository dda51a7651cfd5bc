"""Threads for the blocking calls of a file store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_io import SlabIo
from kvactors.threads import Workers

CALLS = 4
"""Calls of Python at the same time, at most: they open, scan and seal."""

T = TypeVar("T")

log = get_logger()


class SlabThreads:
    """A pool of threads for calls of Python, and the native threads that move objects.

    Attributes:
        depth: calls at the same time.
        workers: the threads.
        io: moves objects.
    """

    def __init__(self, files: SlabFiles, depth: int, write_depth: int) -> None:
        """depth: reads, write_depth: writes at the same time."""
        self.depth = min(depth, CALLS)
        self.workers = Workers(self.depth, "kvactors-file")
        self.io = SlabIo(files, depth, write_depth)

    @property
    def busy(self) -> int:
        """Calls that have not ended."""
        return self.workers.busy + self.io.in_flight

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Make a blocking call and wait until it has ended, even if cancelled: the call works on
        memory that the caller lent."""
        return await wait_uncancelled(
            asyncio.wrap_future(self.workers.submit(lambda: function(*args)))
        )

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Await the coroutines that `work` makes, as many concurrently as there are threads."""
        queue = iter(work)

        async def worker() -> None:
            for item in queue:
                await item()

        async with anyio.create_task_group() as tasks:
            for _ in range(min(self.depth, len(work))):
                tasks.start_soon(worker)

    async def close(self, files: SlabFiles, limit: float) -> bool:
        """End the threads and close the files, which gives up the lock.

        Args:
            files: of the store.
            limit: seconds that running calls may take to end. Threads that hang for longer are
                abandoned, and the files stay open for them.

        Returns:
            Whether every call has ended.
        """
        began = now()
        ended = await self.workers.drained(limit)
        ended &= await self.io.drained(max(0.0, began + limit - now()))
        if ended:
            await self.run(self.io.close, limit)
            self.workers.close()
            files.close()
            return True
        log.warning(
            "store threads hang and are abandoned",
            folder=str(files.folder),
            threads=self.busy,
        )
        self.workers.submit(self.io.when_idle())
        self.workers.close()
        self.io.close(0.0)
        files.unlock()
        # A descriptor in use must not become another file's.
        self.workers.afterwards(files.drop)
        return False
