"""The end of a cache: every step ends before one deadline, whatever a disk, a sink or a thread
does. No error of a step prevents the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.supervisor import LEAST_STEP, brief
from kvactors.actor.uncancelled import ThreadWaits, uncancelled
from kvactors.device.arena import HostSlots

QUIET, STOP = 0.6, 0.9
"""Parts of the time by which the actors have nothing left to do, and by which they have ended. The
rest is for closing what they used."""

log = get_logger()


class Shutdown:
    """limit: seconds from `begin` to the end. arena: host memory, which stays mapped if a step does
    not end. forked: whether this is a forked child: then nothing is closed, because files, sockets
    and locks are the parent's."""

    def __init__(self, limit: float, arena: HostSlots) -> None:
        self.limit = limit
        self.arena = arena
        self.waits = ThreadWaits()
        self.unfinished: list[str] = []
        self.forked = False
        self._began: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start the clock; once."""
        if self._began is None:
            self._began = now()
            self._timer = asyncio.get_running_loop().call_at(self.at(STOP), self.waits.abandon)

    def at(self, part: float) -> float:
        """When a part of the time is over."""
        if self._began is None:
            raise RuntimeError("the shutdown has not begun")
        return self._began + part * self.limit

    def left(self, part: float) -> float:
        """Seconds until then, and a little if it is past."""
        return max(LEAST_STEP, self.at(part) - now())

    async def step(
        self, name: str, close: Callable[[], Awaitable[None]], limit: float = float("inf")
    ) -> None:
        """Close one thing, whatever is cancelled: in `limit` seconds, and in what is left. Errors
        are logged."""
        if self.forked:
            return
        await uncancelled(self._step(name, close, limit))

    async def _step(self, name: str, close: Callable[[], Awaitable[None]], limit: float) -> None:
        self.begin()

        async def closing() -> None:
            await close()

        task = asyncio.get_running_loop().create_task(closing(), name=f"closing {name}")
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
            self.unfinished.append(name)
            log.error("closing did not end in time", part=name)
        elif (failure := task.exception()) is not None:
            log.error("closing failed", part=name, error=brief(failure))
        if cancelled is not None:
            raise cancelled

    def over(self, *, stuck: bool = False) -> None:
        """Everything is closed, or given up. stuck: a thread of the store may still access the
        arena."""
        if self._timer is not None:
            self._timer.cancel()
        if self.waits.abandoned:
            self.arena.keep()
            log.error("threads did not end in time", threads=self.waits.abandoned)
        if stuck or self.arena.in_use:
            self.arena.keep()
