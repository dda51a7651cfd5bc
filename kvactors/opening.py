"""The opening of what a cache or a rank uses: each part within `actors.start` seconds, whatever
foreign code does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvactors.actor.log import get_logger
from kvactors.actor.supervisor import LEAST_STEP
from kvactors.actor.uncancelled import uncancelled
from kvactors.errors import KVActorsError
from kvactors.shutdown import STOP, Shutdown

log = get_logger()


class Opening:
    """limit: seconds that one part may take. shutdown: of the same cache; it begins when a part is
    late."""

    def __init__(self, limit: float, shutdown: Shutdown) -> None:
        self.limit = limit
        self.shutdown = shutdown

    async def step(
        self,
        part: str,
        call: Callable[[], Awaitable[None]],
        late: type[KVActorsError],
        least: float = 0.0,
    ) -> None:
        """Open one part in a task of its own. least: seconds that it may take, if they are more
        than the limit.

        A part that is late, or whose opening is cancelled, is cancelled. If it still has not ended
        when the actors of a shutdown must have, it is left behind, and host memory stays mapped.
        The caller closes the part in either case.

        Raises:
            late: the part took longer than the limit, or cancelled itself.
        """

        async def opening() -> None:
            await call()

        task = asyncio.get_running_loop().create_task(opening(), name=f"opening {part}")
        try:
            await asyncio.wait((task,), timeout=max(self.limit, least))
        except BaseException:
            await uncancelled(self._cancel(part, task))
            raise
        if not task.done():
            await uncancelled(self._cancel(part, task))
            raise late(f"{part} did not open in {max(self.limit, least):g} s (actors.start)")
        if task.cancelled():
            raise late(f"{part} did not open: it raised CancelledError")
        task.result()

    async def _cancel(self, part: str, task: asyncio.Task[None]) -> None:
        self.shutdown.begin()
        task.add_done_callback(_retrieve)
        task.cancel()
        await asyncio.wait((task,), timeout=self.shutdown.left(STOP) + LEAST_STEP)
        if not task.done():
            self.shutdown.unfinished.append(part)
            self.shutdown.arena.keep()
            log.error("opening did not end in time", part=part)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Look at a result that no caller receives, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
