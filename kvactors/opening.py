"""Opening of the parts of a cache or a rank, each within `actors.open_timeout_s` seconds.

The limit holds even if foreign code does not return.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvactors.actor.log import get_logger
from kvactors.actor.supervisor import LEAST_STEP
from kvactors.actor.uncancelled import retrieve, uncancelled
from kvactors.errors import KVActorsError
from kvactors.shutdown import STOP, Shutdown

log = get_logger()


class Opening:
    """Opens parts one after another.

    Attributes:
        limit: seconds that one part may take.
        shutdown: of the same cache. It begins when a part is late.
    """

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
        """Open one part in a separate task.

        The task is cancelled if it is late or if the caller is cancelled. If it has not ended by
        the time at which a shutdown's actors must have, it is abandoned, and host memory stays
        mapped. The caller closes the part in either case.

        Args:
            part: name of the part, for errors and logs.
            call: opens it.
            late: type of the error for a late part.
            least: seconds that the part may take, if more than the limit.

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
            raise late(
                f"{part} did not open in {max(self.limit, least):g} s (actors.open_timeout_s)"
            )
        if task.cancelled():
            raise late(f"{part} did not open: it raised CancelledError")
        task.result()

    async def _cancel(self, part: str, task: asyncio.Task[None]) -> None:
        task.add_done_callback(retrieve)
        task.cancel()
        await asyncio.wait((task,), timeout=self._time_to_end())
        if not task.done():
            self.shutdown.unfinished.append(part)
            self.shutdown.arena.keep()
            log.error("opening did not end in time", part=part)

    def _time_to_end(self) -> float:
        """A part is late: the cache ends. Seconds until a cancelled part is abandoned."""
        self.shutdown.begin()
        return self.shutdown.left(STOP) + LEAST_STEP
