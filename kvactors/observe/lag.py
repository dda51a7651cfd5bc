"""Event loop lag: a ticker records how much longer than requested each of its sleeps took, and how
much of that its thread computed or waited for a core."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple, TypeAlias

import numpy as np

from kvactors.actor.clock import now
from kvactors.histogram import Histogram

TICK_S = 0.001
LAG_TIMER_S = 0.05

# Linux: nanoseconds that a thread ran, and that it was runnable without a core
SCHEDSTAT = "/proc/thread-self/schedstat"


Lags: TypeAlias = dict[str, dict[str, float]]
"""Percentiles in milliseconds of the loop's lag (`wall`), of the lag without the time in which the
loop's thread was runnable and no core was free (`own`, empty where the system does not count that
time), and of the processor time of the loop's thread within the lag (`cpu`)."""


class Tick(NamedTuple):
    """One late tick, in seconds. waited: since the tick before, runnable without a core."""

    lag: float
    cpu: float
    waited: float

    @property
    def own(self) -> float:
        return max(0.0, self.lag - self.waited)


class LagMonitor:
    """Collects lags while `running`."""

    def __init__(self) -> None:
        self.ticks: list[Tick] = []
        self.sees_waits = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[LagMonitor]:
        schedstat = -1
        with suppress(OSError):
            schedstat = os.open(SCHEDSTAT, os.O_RDONLY)
        self.sees_waits = schedstat >= 0
        ticker = asyncio.get_running_loop().create_task(self._tick(schedstat))
        try:
            yield self
        finally:
            ticker.cancel()
            await asyncio.gather(ticker, return_exceptions=True)
            if schedstat >= 0:
                os.close(schedstat)

    async def _tick(self, schedstat: int) -> None:
        clock = asyncio.get_running_loop().time
        ran, waited = time.thread_time(), waited_s(schedstat)
        while True:
            due = clock() + TICK_S
            await asyncio.sleep(TICK_S)
            lag = max(0.0, clock() - due)
            now_ran, now_waited = time.thread_time(), waited_s(schedstat)
            self.ticks.append(Tick(lag, now_ran - ran, now_waited - waited))
            ran, waited = now_ran, now_waited

    def take(self) -> list[Tick]:
        """The ticks so far. They are forgotten."""
        taken, self.ticks[:] = self.ticks[:], []
        return taken

    def results(self) -> Lags:
        return lags_of(self.ticks, sees_waits=self.sees_waits)


def lags_of(ticks: list[Tick], *, sees_waits: bool) -> Lags:
    """Percentiles of ticks. A tick is late by what happened after it was due, and the counters
    cover the sleep before as well: `cpu` is at most one TICK_S above, `own` below the truth."""
    return {
        "wall": percentiles([tick.lag for tick in ticks]),
        "own": percentiles([tick.own for tick in ticks]) if sees_waits else {},
        "cpu": percentiles([min(tick.lag, tick.cpu) for tick in ticks]),
    }


def waited_s(schedstat: int) -> float:
    """Seconds that a thread was runnable without a core, zero if the file is not open (-1)."""
    return int(os.pread(schedstat, 64, 0).split()[1]) / 1e9 if schedstat >= 0 else 0.0


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In milliseconds, all zero without values."""
    found = np.percentile(np.array(seconds or [0.0]) * 1e3, [50, 99, 99.9]).tolist()
    return {name: round(one, 4) for name, one in zip(("p50", "p99", "p999"), found, strict=True)}


class LagTimer:
    """Counts the seconds by which a timer of the running loop is late, until it is stopped or no
    longer wanted."""

    def __init__(self, lags: Histogram, wanted: Callable[[], bool]) -> None:
        self._lags, self._wanted = lags, wanted
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._set()

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _set(self) -> None:
        due = now() + LAG_TIMER_S
        self._handle = self._loop.call_later(LAG_TIMER_S, self._late, due)

    def _late(self, due: float) -> None:
        self._lags.observe(max(0.0, now() - due))
        if self._wanted():
            self._set()
