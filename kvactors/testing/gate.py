"""Waits of the fakes: latencies drawn from a seed, and gates that stay shut until they are
opened."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

Latency = Callable[[], float]
"""Seconds the next operation takes."""

SLOWER = 0.03
"""Seconds more that a slow operation takes, for each of a fault's `amount`."""

TAIL = 20
"""A latency is at most so many times its mean."""


def instant() -> float:
    """No time at all."""
    return 0.0


def latency(rng: random.Random, mean: float) -> Latency:
    """Exponential, with its tail cut."""

    def draw() -> float:
        return min(TAIL * mean, rng.expovariate(1 / mean))

    return draw


class Gate:
    """Callers that pass wait while the gate is shut. waited: number of calls that waited."""

    def __init__(self) -> None:
        self.shut = False
        self.waited = 0
        self._waiters: list[asyncio.Future[None]] = []

    def close(self) -> None:
        """Make callers wait."""
        self.shut = True

    def open(self) -> None:
        """Let all callers through."""
        self.shut = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def passed(self) -> None:
        """Return once it is open."""
        self.waited += self.shut
        while self.shut:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
