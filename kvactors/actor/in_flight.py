"""Counts the work in flight in a wired system: messages queued or in a turn, and counted child
jobs."""

from __future__ import annotations

import asyncio


class InFlight:
    """A plain count with a way to wait for zero. Every message and job of one system shares one."""

    __slots__ = ("_waiters", "begun", "count")

    def __init__(self) -> None:
        self.count = 0
        self.begun = 0  # in all: unchanged between two looks, nothing has happened in between
        self._waiters: list[asyncio.Future[None]] = []

    def begin(self, n: int = 1) -> None:
        """Add `n` items of work in flight."""
        self.count += n
        self.begun += n

    def end(self, n: int = 1) -> None:
        """Remove `n` items of work. At zero every task in `wait_idle` wakes."""
        self.count -= n
        if self.count < 0:
            raise AssertionError("more endings than beginnings")
        if not self.count and self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait_idle(self) -> None:
        """Return when nothing is in flight. The caller sets the deadline (`anyio.fail_after`)."""
        while self.count:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
