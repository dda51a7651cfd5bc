"""SinkCaller: starts the calls of sinks and their deadlines, and reports their ends to the
notifier."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial

from kvactors.actor import Actor
from kvactors.config import FlushConfig
from kvactors.flush_notifier.deliveries import SinkDelivery
from kvactors.flush_notifier.messages import CallLate, Delivered, ResyncDue, RetryDue
from kvactors.flush_notifier.sink_calls import error_of, start_call
from kvactors.flush_notifier.sink_set import SinkSet


class SinkCaller:
    """Calls sinks for one incarnation of the notifier. Reports arrive as its control messages."""

    def __init__(self, notifier: Actor, sinks: SinkSet, config: FlushConfig, epoch: int) -> None:
        self._notifier = notifier
        self._sinks = sinks
        self._config = config
        self._epoch = epoch

    def start(self) -> None:
        """Watch the calls of an earlier incarnation that have not ended, and start the timers of
        resyncs."""
        for delivery in self._sinks:
            call = delivery.sink.call
            if call is not None and not call.done():
                delivery.stuck = True
                self._report_end(delivery.sink.name, call, -1)
            if delivery.sink.resync_interval:
                self._notifier.after(delivery.sink.resync_interval, ResyncDue(delivery.sink.name))

    def call(self, delivery: SinkDelivery) -> Iterator[None]:
        """Call a sink with its next batch, or with the epoch. Steps."""
        yield from delivery.take(self._epoch)
        tasks = tuple(delivery.batch.tasks)
        call = start_call(
            delivery.sink, partial(delivery.call, self._epoch, tasks, begun=delivery.begun)
        )
        self._report_end(delivery.sink.name, call, delivery.number)
        late = CallLate(delivery.sink.name, delivery.number)
        delivery.timer = self._notifier.after(self._config.timeout_s, late)

    def _report_end(self, name: str, call: asyncio.Task[str], number: int) -> None:
        def ended(call: asyncio.Task[str]) -> None:
            self._notifier.to_self(Delivered(name, number, error_of(call)))

        call.add_done_callback(ended)

    def give_up(self, delivery: SinkDelivery) -> Iterator[None]:
        """Cancel a call that missed its deadline, and continue without its answer."""
        delivery.stuck = True
        if delivery.sink.call is not None:
            delivery.sink.call.cancel()
        return self.end(delivery, f"no answer within {self._config.timeout_s} s")

    def end(self, delivery: SinkDelivery, error: str) -> Iterator[None]:
        """The call in flight ended: note the result, and start the back-off after an error.

        Returns:
            The steps of the ledger's part.
        """
        if delivery.timer is not None:
            delivery.timer.cancel()
        delivery.number += 1  # later reports of this call are late
        log, name = self._notifier.log, delivery.sink.name
        if error:
            delay = delivery.call_failed(error)
            if delivery.failures == 1:
                log.warning("sink fails", sink=name, error=error, again_in=delay)
            self._notifier.after(delay, RetryDue(name))
        elif (failed_for := delivery.call_succeeded()) is not None:
            log.info(
                "sink works again",
                sink=name,
                failed_for=round(failed_for, 3),
                last_error=delivery.last_error,
            )
        return self._sinks.finish_call(delivery)

    def stop(self) -> None:
        """Cancel the calls in flight. The next incarnation waits for their end, or the close of the
        sink."""
        for delivery in self._sinks:
            if delivery.timer is not None:
                delivery.timer.cancel()
            if delivery.in_flight and delivery.sink.call is not None:
                delivery.sink.call.cancel()
