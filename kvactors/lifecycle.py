"""Opening of the parts of a cache, and its shutdown, of which every step ends before one deadline.

The deadline holds even if a disk, a sink or a thread does not respond. An error in one step does
not prevent the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio

from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.actor.supervisor import LEAST_STEP
from kvactors.actor.uncancelled import ThreadWaits, retrieve, uncancelled
from kvactors.device.arena import HostSlots
from kvactors.errors import KVActorsError

QUIET, STOP = 0.6, 0.9
"""Fractions of the limit by which the actors must be idle, and by which they must have ended.

The rest is for closing stores, sinks and devices.
"""

log = get_logger()


class Shutdown:
    """Deadline and steps of the shutdown of a cache.

    Attributes:
        waits: waits for threads, abandoned when the actors must have ended.
        forked: whether this is a forked child. A child closes nothing, because files, sockets and
            locks belong to the parent.
    """

    def __init__(self, limit: float, arena: HostSlots) -> None:
        self.limit = limit
        self.arena = arena
        self.waits = ThreadWaits()
        self.forked = False
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def begun(self) -> bool:
        return self._began is not None

    def begin(self) -> None:
        if self._began is None:
            self._began = now()
            self._timer = asyncio.get_running_loop().call_at(self.at(STOP), self.waits.abandon)

    def at(self, part: float) -> float:
        if self._began is None:
            raise RuntimeError("the shutdown has not begun")
        return self._began + part * self.limit

    def left(self, part: float) -> float:
        """Seconds until `at(part)`, at least LEAST_STEP."""
        return max(LEAST_STEP, self.at(part) - now())

    async def step(
        self, name: str, close: Callable[[], Awaitable[None]], limit: float = float("inf")
    ) -> None:
        """Close one part, even if the caller is cancelled. Errors are logged."""
        if self.forked:
            return
        await uncancelled(self._step(name, close, limit))

    async def _step(self, name: str, close: Callable[[], Awaitable[None]], limit: float) -> None:
        self.begin()

        task = asyncio.get_running_loop().create_task(_awaited(close), name=f"closing {name}")
        cancelled: BaseException | None = None
        for seconds in (min(limit, self.left(1.0)), LEAST_STEP):
            try:
                with anyio.move_on_after(seconds):
                    await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
            if task.done():
                break
            self.arena.keep()
            task.cancel()
        if not task.done() or task.cancelled():
            log.error("closing did not end in time", part=name)
        elif (failure := task.exception()) is not None:
            log.error("closing failed", part=name, error=described(failure))
        if cancelled is not None:
            raise cancelled

    def over(self, *, stuck: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.waits.abandoned:
            self.arena.keep()
            log.error("threads did not end in time", threads=self.waits.abandoned)
        if stuck or self.arena.in_use:
            self.arena.keep()


class Opening:
    """Opens parts one after another, each in `limit` seconds, even if foreign code hangs."""

    def __init__(self, limit: float, shutdown: Shutdown, *, ends_cache: bool = True) -> None:
        self.limit = limit
        self.shutdown = shutdown
        self.ends_cache = ends_cache

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
            least: seconds that the part may take, if more than the limit.

        Raises:
            late: the part took longer than the limit, or cancelled itself.
        """
        limit = max(self.limit, least)
        task = asyncio.get_running_loop().create_task(_awaited(call), name=f"opening {part}")
        task.add_done_callback(retrieve)
        try:
            await asyncio.wait((task,), timeout=limit)
        finally:
            if not (ended := task.done()):
                await uncancelled(self._cancel(part, task))
        if not ended:
            raise late(f"{part} did not open in {limit:g} s (actors.open_timeout_s)")
        if task.cancelled():
            raise late(f"{part} did not open: it raised CancelledError")
        task.result()

    async def _cancel(self, part: str, task: asyncio.Task[None]) -> None:
        task.cancel()
        if self.ends_cache:
            self.shutdown.begin()
        limit = self.shutdown.left(STOP) + LEAST_STEP if self.ends_cache else self.limit
        await asyncio.wait((task,), timeout=limit)
        if not task.done():
            self.shutdown.arena.keep()
            log.error("opening did not end in time", part=part)


async def _awaited(call: Callable[[], Awaitable[None]]) -> None:
    await call()
