"""Event loop lag: a ticker records how much longer than requested each of its sleeps took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import numpy as np

from kvactors.actor.clock import now
from kvactors.histogram import Histogram

INTERVAL = 0.001
"""Seconds between ticks."""

TIMER = 0.05
"""Seconds between the timers of a `LagTimer`: 20 callbacks a second."""


class Lag(NamedTuple):
    """Percentiles of the loop's lag in milliseconds."""

    p50: float
    p99: float
    p999: float

    def as_dict(self) -> dict[str, float]:
        """For reports."""
        return {name: round(value, 4) for name, value in self._asdict().items()}


class LagMonitor:
    """Collects lags while `running`."""

    def __init__(self) -> None:
        self.lags: list[float] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LagMonitor]:
        """Tick until the block ends."""
        ticker = asyncio.get_running_loop().create_task(self._tick())
        try:
            yield self
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + INTERVAL
            await asyncio.sleep(INTERVAL)
            self.lags.append(max(0.0, loop.time() - due))

    def result(self) -> Lag:
        """Percentiles so far. All are zero before the first tick."""
        if not self.lags:
            return Lag(0.0, 0.0, 0.0)
        p50, p99, p999 = np.percentile(np.array(self.lags) * 1e3, [50, 99, 99.9])
        return Lag(float(p50), float(p99), float(p999))


class LagTimer:
    """Counts the lags of a timer of the running loop, until it is stopped.

    Args:
        lags: receives the seconds by which each callback is late.
        wanted: whether another timer is set after a callback.
    """

    def __init__(self, lags: Histogram, wanted: Callable[[], bool]) -> None:
        self._lags, self._wanted = lags, wanted
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._set()

    def stop(self) -> None:
        """Set no further timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _set(self) -> None:
        due = now() + TIMER
        self._handle = self._loop.call_later(TIMER, self._late, due)

    def _late(self, due: float) -> None:
        self._lags.observe(max(0.0, now() - due))
        if self._wanted():
            self._set()
