"""One sink's side of the notifier: the call in flight, what the last calls returned, and how calls
to a sink are contained.

A sink is foreign code. A call runs in a task of its own, and whatever it raises ends there as a
text: no exception of a sink, a leaked CancelledError or another BaseException among them, reaches
the notifier. KeyboardInterrupt alone passes. A call that does not end when its time is over is
cancelled and reported as failed at once; the next call waits until the task has really ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import anyio

from kvactors.actor import Envelope
from kvactors.actor.actor import Timer
from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.errors import KVActorsError, SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.runs import Batch
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.types import Residency

GRACE = 0.5
"""Seconds in which a call that was cancelled may end before the cache closes without it."""


class SinkStatistics(NamedTuple):
    """A moment's picture of one sink."""

    name: str
    pending: int  # blocks on which its view differs from what is due
    delivered: int  # tasks it took
    resident: int  # of those, tasks with residency RESIDENT
    gone: int
    blocks: int  # blocks in them
    retried: int
    coalesced: int  # differences that vanished before they were sent
    oldest_pending_age: float  # seconds
    in_flight: bool
    failures: int  # calls in a row that failed
    failing_for: float  # seconds since the first of them, 0 if there is none
    last_error: str  # of the last call that failed, also after a recovery
    resyncs: int  # how often it was sent everything again


class SinkHealth(NamedTuple):
    """Whether a sink takes what it is sent. reason: why not, empty if ok."""

    name: str
    ok: bool
    reason: str
    failing_for: float
    pending: int


class Delivery:
    """One sink's side of the notifier. begun: whether it took this incarnation's epoch. waiting:
    for the end of a back-off. stuck: a call that was given up has not ended yet. number: of the
    last call. anew: everything is to be sent anew when the call in flight is over. repeat: the
    steps to come of a slow repetition, step: one of them is due. asks: for a resync that has not
    begun."""

    __slots__ = (
        "anew",
        "asks",
        "batch",
        "begun",
        "blocks",
        "delay",
        "delivered",
        "failing_since",
        "failures",
        "gone",
        "in_flight",
        "last_error",
        "number",
        "repeat",
        "resident",
        "resyncs",
        "retried",
        "since",
        "sink",
        "step",
        "stuck",
        "timer",
        "waiting",
    )

    def __init__(self, sink: Sink, delay: float) -> None:
        self.sink = sink
        self.delay = delay
        self.begun = self.in_flight = self.waiting = self.stuck = self.anew = self.step = False
        self.repeat: Iterator[None] | None = None
        self.asks: list[Envelope[bool]] = []
        self.resyncs = 0
        self.batch = Batch([], [])
        self.since: float | None = None  # since when something has been pending
        self.timer: Timer | None = None
        self.number = 0
        self.failures = 0  # in a row
        self.failing_since: float | None = None
        self.last_error = ""
        self.delivered = self.resident = self.gone = self.blocks = self.retried = 0

    def count(self, tasks: Sequence[FlushTask]) -> None:
        """The sink took these."""
        self.delivered += len(tasks)
        for task in tasks:
            self.blocks += task.count
            self.resident += task.residency is Residency.RESIDENT
            self.gone += task.residency is Residency.GONE

    def failed(self, error: str) -> bool:
        """The last call failed; whether the one before had not."""
        self.retried += 1
        self.failures += 1
        self.last_error = error
        if self.failing_since is None:
            self.failing_since = now()
        return self.failures == 1

    def took(self, delay: float) -> float | None:
        """The last call succeeded; for how long calls had failed before, None if they had not."""
        since, self.failing_since = self.failing_since, None
        self.begun, self.delay, self.failures = True, delay, 0
        return None if since is None else now() - since

    @property
    def failing_for(self) -> float:
        """Seconds since calls began to fail; 0 if the last one succeeded."""
        return 0.0 if self.failing_since is None else now() - self.failing_since

    def ready(self, pending: int) -> bool:
        """Whether it can be called, and there is something to call it for."""
        return not (self.in_flight or self.waiting or self.stuck) and (
            bool(pending) or not self.begun
        )

    def split(self) -> tuple[Batch, Batch]:
        """The batch whose call failed: what was taken for certain (`Sink.taken`), and the rest."""
        try:
            taken: Any = self.sink.taken
        except Exception:
            taken = 0
        sound = type(taken) is int and 0 <= taken <= len(self.batch.tasks) and self.begun
        return self.batch.split(taken if sound else 0)

    def statistics(self, pending: int, coalesced: int) -> SinkStatistics:
        """A moment's picture."""
        return SinkStatistics(
            self.sink.name,
            pending,
            self.delivered,
            self.resident,
            self.gone,
            self.blocks,
            self.retried,
            coalesced,
            now() - self.since if self.since is not None else 0.0,
            self.in_flight,
            self.failures,
            self.failing_for,
            self.last_error,
            self.resyncs,
        )

    def health(self, pending: int) -> SinkHealth:
        """Whether the last call succeeded."""
        reason = "" if not self.failures else self.last_error
        return SinkHealth(self.sink.name, not self.failures, reason, self.failing_for, pending)


async def contained(work: Callable[[], Awaitable[Any]]) -> str:
    """Carry out foreign code: empty, or what it raised."""
    try:
        await work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return described(error)
    return ""


def start_call(sink: Sink, work: Callable[[], Awaitable[Any]]) -> asyncio.Task[str]:
    """Call a sink in a task of its own. Its result is empty, or the error's text."""
    task = asyncio.get_running_loop().create_task(contained(work), name=f"call of sink {sink.name}")
    sink.call = task
    return task


async def open_sink(sink: Sink) -> None:
    """Open a sink. What it raises beside the package's own errors becomes a SinkError."""
    try:
        await sink.open()
    except (KVActorsError, KeyboardInterrupt):
        raise
    except BaseException as error:
        current = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (current is None or current.cancelling()):
            raise
        raise SinkError(f"sink {sink.name!r} could not be opened: {described(error)}") from error


async def close_sink(sink: Sink, limit: float) -> None:
    """Let the last call end and close a sink, in about `limit` seconds. Never raises: what goes
    wrong is logged."""
    log = get_logger()

    async def work() -> None:
        if sink.call is not None and not sink.call.done():
            sink.call.cancel()
            await asyncio.wait([sink.call])
        await sink.close()

    task = asyncio.get_running_loop().create_task(
        contained(work), name=f"close of sink {sink.name}"
    )
    with anyio.move_on_after(limit):
        await asyncio.wait([task])
    if not task.done():
        task.cancel()
        with anyio.move_on_after(GRACE):
            await asyncio.wait([task])
        log.warning("sink did not close in time", sink=sink.name, seconds=limit)
    elif error := task.result():
        log.warning("sink failed to close", sink=sink.name, error=error)
