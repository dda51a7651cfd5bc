"""Threads for the blocking calls of a file store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.threads import Workers

T = TypeVar("T")

log = get_logger()


class SlabThreads:
    """A pool of threads.

    Attributes:
        depth: calls at the same time.
        workers: the threads.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.workers = Workers(depth, "kvactors-file")

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
        ended = await self.workers.drained(limit)
        self.workers.close()
        if ended:
            files.close()
            return True
        log.warning(
            "store threads hang and are abandoned",
            folder=str(files.folder),
            threads=self.workers.busy,
        )
        files.unlock()
        # A descriptor in use must not become another file's.
        self.workers.afterwards(files.drop)
        return False
