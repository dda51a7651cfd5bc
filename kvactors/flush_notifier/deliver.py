"""Deliveries to sinks: the time and content of calls, their results, and who waits for them.

A sink is foreign code. Each call runs in its own task, and every exception but KeyboardInterrupt
ends there as a text, a leaked CancelledError or another BaseException included. A call that misses
its deadline is cancelled and reported as failed. The next call waits until the task has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import anyio

from kvactors.actor import Count, Envelope, Timer
from kvactors.actor.clock import now
from kvactors.actor.log import described, get_logger
from kvactors.actor.sliced import Sliced, finish
from kvactors.errors import KVActorsError, SinkError
from kvactors.flush_notifier.ledger import Ledger, Tiers
from kvactors.flush_notifier.messages import Resync, WaitFlushed
from kvactors.flush_notifier.sinks.base import Sink, in_turn
from kvactors.flush_notifier.view import DeliveryBatch, SinkView
from kvactors.settings import FlushConfig
from kvactors.types import Residency

STEP_BLOCKS = 256  # in one slice of work
CLOSE_GRACE_S = 0.5  # time in which a cancelled call may end before the cache closes without it


class SinkStatistics(NamedTuple):
    """Counters of one sink as of now.

    Attributes:
        name: its name.
        pending: blocks on which its view differs from the due state.
        delivered: acknowledged tasks.
        resident: acknowledged tasks about resident blocks.
        gone: acknowledged tasks about blocks that are gone.
        blocks: blocks in acknowledged tasks.
        retried: failed calls. Each is repeated after a pause.
        coalesced: differences that ended before they were sent.
        oldest_pending_age: age of the oldest pending difference, seconds.
        in_flight: whether a call has not returned.
        failures: failed calls in a row.
        failing_for: seconds since the first of them, 0 without one.
        last_error: error of the last failed call, kept after a recovery.
        resyncs: resyncs.
    """

    name: str
    pending: int
    delivered: Count
    resident: Count
    gone: Count
    blocks: Count
    retried: Count
    coalesced: Count
    oldest_pending_age: float
    in_flight: bool
    failures: int
    failing_for: float
    last_error: str
    resyncs: Count


class SinkDelivery:
    """Calls to one sink.

    Attributes:
        begun: it acknowledged this incarnation's epoch.
        in_flight: a batch or an epoch is with the sink, or the ledger's part of its end is not
            done.
        number: of the last call. A report with another number is late.
        stuck: a call that missed its deadline has not ended.
        undelivered: the failures in a row include a delivery.
        since: when something became pending, None if nothing is.
        resync_due: the complete state is due, from the next call on.
    """

    def __init__(self, sink: Sink, view: SinkView, config: FlushConfig) -> None:
        self.sink = sink
        self.view = view
        self._config = config
        self.begun = self.in_flight = self.backing_off = self.stuck = False
        self.batch = DeliveryBatch([], [])
        self.number = 0
        self.timer: Timer | None = None
        self.since: float | None = None
        self.resync_due = False
        self.resyncs = 0
        self.delay = config.retry_min_s
        self.failures = 0  # in a row
        self.failed = self.undelivered = False
        self.failing_since: float | None = None
        self.last_error = ""
        self.delivered = self.resident = self.gone = self.blocks = self.retried = 0

    # -- calls

    def ready(self) -> bool:
        return not (self.in_flight or self.backing_off or self.stuck) and (
            bool(self.view.dirty) or self.resyncing or not self.begun
        )

    @property
    def resyncing(self) -> bool:
        """Whether blocks of a resync are not among the pending ones yet."""
        return self.resync_due or self.view.repeated is not None

    def note_pending(self) -> None:
        if self.since is None and self.view.dirty:
            self.since = now()

    def take(self, epoch: int) -> Iterator[None]:
        """Make the next call's batch, in slices. There is none before the epoch has begun. A resync
        begins here, since the batch of a call in flight is not in the view."""
        if self.resync_due and self.view.repeated is None:
            self.resync_due = False
            self.resyncs += 1
            if self.sink.repeats:
                self.view.repeat()
            else:
                self.begun = False
                yield from self.view.reset()
        if self.begun:
            self.batch = yield from self.view.take(self._config.batch, epoch)
        self.number += 1

    def start(self, epoch: int) -> asyncio.Task[str]:
        """Call the sink in its own task. The result is empty, or the error's text."""
        begun, tasks = self.begun, tuple(self.batch.tasks)

        async def call() -> None:
            if begun:
                self.sink.num_acknowledged = 0
                if tasks:
                    await in_turn(self.sink, partial(self.sink.deliver, tasks))
            else:
                self.sink.set_snapshot_source(self.view.held_blocks)
                await in_turn(self.sink, partial(self.sink.begin_epoch, epoch))
            if not begun or any(not task.count for task in tasks):
                for reset in self.sink.on_reset:
                    reset()

        name = f"call of sink {self.sink.name}"
        self.sink.call = asyncio.get_running_loop().create_task(contained(call), name=name)
        return self.sink.call

    def is_current(self, number: int) -> bool:
        return self.in_flight and number == self.number

    def call_failed(self, error: str) -> float:
        """The call in flight failed. Returns the seconds to back off."""
        self.retried += 1
        self.failures += 1
        self.failed = True
        self.undelivered |= self.begun
        self.last_error = error
        self.backing_off = True
        self.failing_since = now() if self.failing_since is None else self.failing_since
        delay, self.delay = self.delay, min(2 * self.delay, self._config.retry_max_s)
        return delay

    def call_succeeded(self) -> float | None:
        """The call in flight succeeded. A sink that takes an epoch still fails if it took no task
        before. Returns the seconds since the first failed call of a row that ends now."""
        delivers, self.begun, self.failed = self.begun, True, False
        if self.undelivered and not delivers:
            return None
        since, self.failing_since, self.undelivered = self.failing_since, None, False
        self.delay, self.failures = self._config.retry_min_s, 0
        return None if since is None else now() - since

    def apply_result(self) -> Iterator[None]:
        """Apply the end of the call to the ledger, in slices. `call_ended` follows."""
        acknowledged, rest = (self.batch, None) if not self.failed else self._split()
        yield from self.view.delivered(acknowledged)
        self.delivered += len(acknowledged.tasks)
        for task in acknowledged.tasks:
            self.blocks += task.count
            self.resident += task.residency is Residency.RESIDENT
            self.gone += task.residency is Residency.GONE
        if rest is not None:
            yield from self.view.refused(rest)

    def call_ended(self) -> bool:
        """The next call may start. Returns whether the call removed everything."""
        cleared = bool(self.batch.cleared)
        self.in_flight = False
        if not self.failed:
            self.since = now() if self.view.dirty else None
        self.batch = DeliveryBatch([], [])
        return cleared

    def _split(self) -> tuple[DeliveryBatch, DeliveryBatch]:
        try:
            count: Any = self.sink.num_acknowledged
        except Exception:
            count = 0
        sound = type(count) is int and 0 <= count <= len(self.batch.tasks) and self.begun
        return self.batch.split(count if sound else 0)

    # -- inspection

    def has_delivered(self, mark: int | None) -> bool:
        """Whether the sink has the changes that began up to a `SinkView.clock`."""
        current = self.begun and not (self.resync_due or self.batch.cleared)
        return mark is not None and current and self.view.delivered_until >= mark

    def statistics(self) -> SinkStatistics:
        at = now()
        return SinkStatistics(
            self.sink.name,
            self.view.pending,
            self.delivered,
            self.resident,
            self.gone,
            self.blocks,
            self.retried,
            self.view.coalesced,
            at - self.since if self.since is not None else 0.0,
            self.in_flight,
            self.failures,
            at - self.failing_since if self.failing_since is not None else 0.0,
            self.last_error,
            self.resyncs,
        )


class SinkSet:
    """The deliveries of all sinks, in the ledger's order, and the asks that wait for sinks.

    Attributes:
        waiters: asks, each with the `SinkView.clock` that each sink's view must reach, None until
            a call ends.
    """

    def __init__(self, sinks: Sequence[Sink], ledger: Ledger, config: FlushConfig) -> None:
        self.ledger = ledger
        self.deliveries = [
            SinkDelivery(sink, view, config) for sink, view in zip(sinks, ledger.sinks, strict=True)
        ]
        self.waiters: list[tuple[Envelope[bool], dict[SinkDelivery, int | None]]] = []
        self._by_name = {delivery.sink.name: delivery for delivery in self.deliveries}

    def __getitem__(self, name: str) -> SinkDelivery:
        return self._by_name[name]

    def finish_call(self, one: SinkDelivery) -> Iterator[None]:
        """Apply the end of a call to the ledger, then the work that waited for it. Slices."""
        yield from one.apply_result()
        # blocks that have come back since everything was removed are sent again
        cleared = one.call_ended()
        for envelope, marks in self.waiters:
            known = not (one.resyncing and isinstance(envelope.message, Resync))
            if one in marks and known and (marks[one] is None or cleared):
                marks[one] = one.view.clock

    # -- waiters

    def wait_for(self, message: WaitFlushed, envelope: Envelope[bool]) -> None:
        """Keep an ask until its sinks have acknowledged the changes due now."""
        asked = [
            delivery
            for delivery in self.deliveries
            if (message.sinks is None or delivery.sink.name in message.sinks)
            and not (message.healthy and delivery.failures)
        ]
        self.wait(envelope, asked)

    def wait(self, envelope: Envelope[bool], sinks: Iterable[SinkDelivery]) -> None:
        """What a call in flight leaves to be corrected is known when it ends, and the blocks of a
        resync when they are pending."""
        resync = isinstance(envelope.message, Resync)
        marks = {one: None if resync or one.in_flight else one.view.clock for one in sinks}
        self.waiters.append((envelope, marks))

    def take_done(self) -> list[Envelope[bool]]:
        return self._take(
            lambda _, marks: all(one.has_delivered(mark) for one, mark in marks.items())
        )

    def take_abandoned(self) -> list[Envelope[bool]]:
        return self._take(lambda envelope, _: envelope.abandoned)

    def _take(
        self, chosen: Callable[[Envelope[bool], dict[SinkDelivery, int | None]], bool]
    ) -> list[Envelope[bool]]:
        taken = [envelope for envelope, marks in self.waiters if chosen(envelope, marks)]
        self.waiters = [waiter for waiter in self.waiters if waiter[0] not in taken]
        return taken

    # -- inspection

    def divergence_steps(self, tiers: Tiers, names: Collection[str] | None = None) -> Sliced[int]:
        """Count the blocks on which a sink's view differs from the announceable blocks of the
        tiers: not those whose path is unknown or interrupted (see `Ledger`), nor gains that are due
        to a sink when the request finishes."""
        differing: set[bytes] = set()
        for one in self.deliveries:
            if names is None or one.sink.name in names:
                mirror = one.sink.live_view
                differing |= yield from self.ledger.divergence_steps(one.view, mirror, tiers)
        return len(differing)

    def divergence(self, tiers: Tiers, names: Collection[str] | None = None) -> int:
        return finish(self.divergence_steps(tiers, names))

    def statistics(self) -> tuple[SinkStatistics, ...]:
        return tuple(delivery.statistics() for delivery in self.deliveries)


# -- calls of foreign code


async def contained(work: Callable[[], Awaitable[Any]]) -> str:
    """Run foreign code. Returns the text of its exception, empty if there is none."""
    try:
        await work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return described(error)
    return ""


def error_of(call: asyncio.Task[str]) -> str:
    """The error of a call that has ended, empty if it succeeded."""
    if call.cancelled():
        return "cancelled"
    error = call.exception()
    return call.result() if error is None else repr(error)


async def open_sink(sink: Sink) -> None:
    """Open a sink. Any error but those of this package is raised as SinkError."""
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
    """Close a sink after its last call, in about `limit` seconds. Failures are logged."""
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
        with anyio.move_on_after(CLOSE_GRACE_S):
            await asyncio.wait([task])
        log.warning("sink did not close in time", sink=sink.name, seconds=limit)
    elif error := task.result():
        log.warning("sink failed to close", sink=sink.name, error=error)
