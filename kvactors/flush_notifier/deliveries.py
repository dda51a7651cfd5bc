"""Deliveries to one sink: the time and content of its calls, and the handling of their results.

Pure state: the actor starts calls and timers, and reports how calls end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvactors.actor import Envelope
from kvactors.actor.actor import Timer
from kvactors.actor.clock import now
from kvactors.config import FlushConfig
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sink_view import SinkView
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.steps import Steps
from kvactors.flush_notifier.tasks import DeliveryBatch
from kvactors.types import Residency

LONGEST_PAUSE = 1.0
"""Seconds between two steps of a slow repetition at most."""

SHORTEST_PAUSE = 0.005
"""Seconds between two steps of a slow repetition at least."""


class SinkStatistics(NamedTuple):
    """Counters of one sink as of now.

    Attributes:
        name: the name of the sink.
        pending: blocks on which its view differs from the due state.
        delivered: tasks that it acknowledged.
        resident: acknowledged tasks about blocks that became resident.
        gone: acknowledged tasks about blocks that are gone.
        blocks: blocks in these tasks.
        retried: calls that failed. Each is repeated after a pause.
        coalesced: differences that ended before they were sent.
        oldest_pending_age: seconds since the oldest pending difference arose.
        in_flight: whether a call has not returned.
        failures: calls in a row that failed.
        failing_for: seconds since the first of them, 0 if there is none.
        last_error: error of the last call that failed, kept after a recovery.
        resyncs: number of resyncs.
    """

    name: str
    pending: int
    delivered: int
    resident: int
    gone: int
    blocks: int
    retried: int
    coalesced: int
    oldest_pending_age: float
    in_flight: bool
    failures: int
    failing_for: float
    last_error: str
    resyncs: int


class SinkHealth(NamedTuple):
    """Whether a sink acknowledges its deliveries.

    Attributes:
        reason: why not, empty if ok.
    """

    name: str
    ok: bool
    reason: str
    failing_for: float
    pending: int


class SinkDelivery:
    """Calls to one sink.

    Attributes:
        sink, view: the sink, and its side of the ledger.
        begun: it acknowledged this incarnation's epoch.
        in_flight: a batch or an epoch is with the sink, or the ledger's part of its end is not
            done.
        batch: the batch in flight.
        number: of the last call. A report with another number is late.
        timer: the deadline of the call in flight.
        backing_off: a failed call was not long enough ago.
        stuck: a call that missed its deadline has not ended.
        since: when something became pending, None if nothing is.
        resync_due: the complete state is sent again after the call in flight.
        resync_asks: asks for a resync that has not begun.
        repeat, repeat_due: the steps left of a slow repetition, and whether one is due.
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
        self.resync_due = self.repeat_due = False
        self.resync_asks: list[Envelope[bool]] = []
        self.repeat: Iterator[None] | None = None
        self.resyncs = 0
        self.delay = config.retry_min_s
        self.failures = 0  # in a row
        self.failed = False  # the last call
        self.undelivered = False  # the failures include a delivery
        self.failing_since: float | None = None
        self.last_error = ""
        self.delivered = self.resident = self.gone = self.blocks = self.retried = 0

    # -- calls

    def ready(self) -> bool:
        """Whether the sink can be called, and there is something to send."""
        return not (self.in_flight or self.backing_off or self.stuck) and (
            bool(self.view.dirty) or not self.begun
        )

    def note_pending(self) -> None:
        """Note when something became pending."""
        if self.since is None and self.view.dirty:
            self.since = now()

    def take(self, epoch: int) -> Iterator[None]:
        """Make the next call's batch, in steps. There is none before the epoch has begun."""
        if self.begun:
            self.batch = yield from self.view.take(self._config.batch, epoch)
        self.number += 1

    async def call(self, epoch: int, tasks: tuple[FlushTask, ...], *, begun: bool) -> None:
        """Call the sink: with the epoch, or with tasks."""
        if begun:
            self.sink.num_acknowledged = 0
            await self.sink.deliver(tasks)
        else:
            self.sink.set_snapshot_source(self.view.held_blocks)
            await self.sink.begin_epoch(epoch)

    def is_current(self, number: int) -> bool:
        """Whether a report is about the call in flight."""
        return self.in_flight and number == self.number

    def call_failed(self, error: str) -> float:
        """The call in flight failed.

        Returns:
            Seconds to back off.
        """
        self.retried += 1
        self.failures += 1
        self.failed = True
        self.undelivered |= self.begun
        self.last_error = error
        self.backing_off = True
        if self.failing_since is None:
            self.failing_since = now()
        delay, self.delay = self.delay, min(2 * self.delay, self._config.retry_max_s)
        return delay

    def call_succeeded(self) -> float | None:
        """The call in flight succeeded. A sink that takes an epoch still fails if it took no task
        before.

        Returns:
            Seconds since the first failed call of a row that ends now, None if none ends.
        """
        delivers, self.begun, self.failed = self.begun, True, False
        if self.undelivered and not delivers:
            return None
        since, self.failing_since, self.undelivered = self.failing_since, None, False
        self.delay, self.failures = self._config.retry_min_s, 0
        return None if since is None else now() - since

    def apply_result(self) -> Iterator[None]:
        """Apply the end of the call to the ledger, in steps. `call_failed` or `call_succeeded` came
        before, `call_ended` follows."""
        if not self.failed:
            yield from self.view.delivered(self.batch)
            self._count(self.batch.tasks)
            return
        acknowledged, rest = self._split()
        yield from self.view.delivered(acknowledged)
        self._count(acknowledged.tasks)
        yield from self.view.refused(rest)

    def call_ended(self) -> bool:
        """The ledger's part of the end is done: the next call may start.

        Returns:
            Whether the call removed everything.
        """
        cleared = bool(self.batch.cleared)
        self.in_flight = False
        if not self.failed:
            self.since = now() if self.view.dirty else None
        self.batch = DeliveryBatch([], [])
        return cleared

    def _split(self) -> tuple[DeliveryBatch, DeliveryBatch]:
        """The batch of a failed call: the tasks that were acknowledged (`Sink.num_acknowledged`),
        and the rest."""
        try:
            count: Any = self.sink.num_acknowledged
        except Exception:
            count = 0
        sound = type(count) is int and 0 <= count <= len(self.batch.tasks) and self.begun
        return self.batch.split(count if sound else 0)

    def _count(self, tasks: Sequence[FlushTask]) -> None:
        self.delivered += len(tasks)
        for task in tasks:
            self.blocks += task.count
            self.resident += task.residency is Residency.RESIDENT
            self.gone += task.residency is Residency.GONE

    # -- resync

    def resync(self) -> Steps[list[Envelope[bool]]]:
        """Mark the complete state to be sent again. No call is in flight.

        Returns:
            The asks that wait until it is acknowledged.
        """
        self.resync_due = False
        if self.sink.repeats:
            yield from self.view.repeat()
        else:
            self.begun = False
            yield from self.view.reset()
        self.resyncs += 1
        asks, self.resync_asks = self.resync_asks, []
        return asks

    def repeat_step(self) -> None:
        """One step of a slow repetition, if one is due and the sink keeps up. Not while a call is
        in flight: the index may lose its tasks before the step."""
        if self.repeat_due and self.view.pending < self._config.batch:
            self.repeat_due = False
            self.repeat = self.repeat or self.view.repeat()
            if next(self.repeat, self) is self:
                self.repeat = None
                self.resyncs += 1

    def repeat_pause(self) -> float:
        """Seconds until the next step of a slow repetition, or until the next repetition."""
        interval, tree = self.sink.resync_interval, self.view.tree
        if not self.repeat_due and self.repeat is None:
            return interval
        return step_pause(interval, len(tree.blocks), tree.step)

    # -- inspection

    @property
    def failing_for(self) -> float:
        """Seconds since calls began to fail, 0 if the last one succeeded."""
        return 0.0 if self.failing_since is None else now() - self.failing_since

    def statistics(self) -> SinkStatistics:
        """Counters as of now."""
        return SinkStatistics(
            self.sink.name,
            self.view.pending,
            self.delivered,
            self.resident,
            self.gone,
            self.blocks,
            self.retried,
            self.view.coalesced,
            now() - self.since if self.since is not None else 0.0,
            self.in_flight,
            self.failures,
            self.failing_for,
            self.last_error,
            self.resyncs,
        )

    def health(self) -> SinkHealth:
        """Whether the sink works: its calls succeed, and the last delivery did."""
        reason = "" if not self.failures else self.last_error
        return SinkHealth(
            self.sink.name, not self.failures, reason, self.failing_for, self.view.pending
        )


def step_pause(interval: float, blocks: int, step: int) -> float:
    """Seconds between the steps of a repetition that comes every `interval` seconds: all steps take
    about half of that."""
    return min(LONGEST_PAUSE, max(SHORTEST_PAUSE, interval * step / (2 * max(1, blocks))))
