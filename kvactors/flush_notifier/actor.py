"""FlushNotifier: keeps the ledger, and delivers to every sink the differences from its view. No
other actor waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import ClassVar

from kvactors.actor import Actor, ActorRef, Envelope, on
from kvactors.errors import SinkError
from kvactors.flush_notifier.deliver import STEP_BLOCKS, SinkDelivery, SinkSet, error_of
from kvactors.flush_notifier.ledger import IDLE_LIMIT, Ledger, RootOf
from kvactors.flush_notifier.messages import (
    BlocksAdded,
    BlocksRemoved,
    CallLate,
    Continue,
    Deliver,
    Delivered,
    NamespaceChanged,
    PathCached,
    PathsFound,
    Report,
    Resync,
    ResyncDue,
    RetryDue,
    SetIdleLimit,
    TierCleared,
    WaitFlushed,
)
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.view import SinkFilter
from kvactors.settings import FlushConfig


class FlushNotifier(Actor):
    """Owns the ledger and calls the sinks, each with one call in flight.

    Facts go to the ledger in the order in which they arrive. A large fact runs in slices, and no
    other fact is taken before its last slice. The epoch is a number of this process, to which each
    incarnation of the actor adds one.
    """

    ROLE: ClassVar[str] = "flush_notifier"

    def __init__(
        self,
        ref: ActorRef,
        *,
        block_size: int,
        sinks: Sequence[Sink],
        config: FlushConfig,
        epoch: int,
        idle_limit: int = IDLE_LIMIT,
        token_root: bytes = b"",
        root_of: RootOf | None = None,
        namespace: str = "",
    ) -> None:
        super().__init__(ref)
        self.epoch = epoch + ref.incarnation
        self.ledger = Ledger(
            block_size,
            [SinkFilter.of(sink) for sink in sinks],
            idle_limit,
            token_root=token_root,
            root_of=root_of,
            namespace=namespace,
        )
        self.sinks = SinkSet(sinks, self.ledger, config)
        self._config = config
        self._woken = False
        self.step = STEP_BLOCKS
        self._unfinished = 0  # facts and deliveries that have slices left

    def started(self) -> None:
        """Call every sink with the new epoch, once its call of an earlier incarnation has ended,
        and start the timers of resyncs."""
        for delivery in self.sinks.deliveries:
            call = delivery.sink.call
            if call is not None and not call.done():
                delivery.stuck = True
                self._report_end(delivery.sink.name, call, -1)
            if delivery.sink.resync_interval:
                self.after(delivery.sink.resync_interval, ResyncDue(delivery.sink.name))
        self._deliver_soon()

    async def stopped(self) -> None:
        """Cancel the calls in flight. The next incarnation, or the close of the sink, waits for
        their end."""
        for delivery in self.sinks.deliveries:
            if delivery.timer is not None:
                delivery.timer.cancel()
            if delivery.in_flight and delivery.sink.call is not None:
                delivery.sink.call.cancel()

    # -- facts

    @on(PathCached)
    @on(BlocksAdded)
    @on(BlocksRemoved)
    @on(TierCleared)
    @on(PathsFound)
    @on(NamespaceChanged)
    def fact(self, fact: Report) -> None:
        if self.sinks.deliveries:
            self._work(self.ledger.apply(fact))

    @on(SetIdleLimit)
    def set_idle_limit(self, message: SetIdleLimit) -> None:
        self.ledger.tree.idle_limit = message.limit

    @on(Continue)
    def continue_work(self, message: Continue) -> None:
        self._unfinished -= 1
        self._work(message.work)

    def _work(self, work: Iterator[None]) -> None:
        """Run one slice. The next one overtakes every other fact. Sinks are called after the last
        slice: half a path in each of two tasks would carry its tokens twice."""
        if next(islice(work, self.step - 1, None), self) is None:
            self._unfinished += 1
            self.to_self(Continue(work))
        else:
            self._deliver_soon()

    # -- deliveries

    def _deliver_soon(self) -> None:
        for delivery in self.sinks.deliveries:
            delivery.note_pending()
            if not (self._woken or self._unfinished) and delivery.ready():
                self._woken = True  # after the turns that are due: one batch for them all
                asyncio.get_running_loop().call_soon(self.to_self, Deliver())
        if self.sinks.waiters:
            for envelope in self.sinks.take_done():
                self.answer(envelope, True)

    @on(Deliver)
    def deliver(self, message: Deliver) -> None:
        self._woken = False
        if not self._unfinished:
            ready = [delivery for delivery in self.sinks.deliveries if delivery.ready()]
            for delivery in ready:
                delivery.in_flight = True
            for delivery in ready:
                self._work(self._call(delivery))

    def _call(self, delivery: SinkDelivery) -> Iterator[None]:
        yield from delivery.take(self.epoch)
        name, number = delivery.sink.name, delivery.number
        self._report_end(name, delivery.start(self.epoch), number)
        delivery.timer = self.after(self._config.timeout_s, CallLate(name, number))

    def _report_end(self, name: str, call: asyncio.Task[str], number: int) -> None:
        call.add_done_callback(lambda call: self.to_self(Delivered(name, number, error_of(call))))

    @on(CallLate)
    def call_late(self, message: CallLate) -> None:
        """Continue without the answer. The next call comes after the end of this one."""
        delivery = self.sinks[message.sink]
        if delivery.is_current(message.number):
            delivery.stuck = True
            if delivery.sink.call is not None:
                delivery.sink.call.cancel()
            self._end(delivery, f"no answer within {self._config.timeout_s} s")

    @on(Delivered)
    def delivered(self, message: Delivered) -> None:
        """A call ended. Its answer counts unless the call missed its deadline before."""
        delivery = self.sinks[message.sink]
        if delivery.is_current(message.number):
            self._end(delivery, message.error)
        else:
            delivery.stuck = False
            self._deliver_soon()

    def _end(self, delivery: SinkDelivery, error: str) -> None:
        """The call in flight ended: note the result, and start the back-off after an error."""
        if delivery.timer is not None:
            delivery.timer.cancel()
        delivery.number += 1  # later reports of this call are late
        name = delivery.sink.name
        if error:
            delay = delivery.call_failed(error)
            if delivery.failures == 1:
                self.log.warning("sink fails", sink=name, error=error, again_in=delay)
            self.after(delay, RetryDue(name))
        elif (failed_for := delivery.call_succeeded()) is not None:
            seconds, error = round(failed_for, 3), delivery.last_error
            self.log.info("sink works again", sink=name, failed_for=seconds, last_error=error)
        self._work(self.sinks.finish_call(delivery))

    @on(RetryDue)
    def retry_due(self, message: RetryDue) -> None:
        self.sinks[message.sink].backing_off = False
        self._deliver_soon()

    # -- resync, and the barrier

    @on(Resync)
    def resync(self, message: Resync, envelope: Envelope[bool]) -> None:
        self._drop_abandoned()
        delivery = self.sinks[message.sink]
        delivery.resync_due = True
        self.sinks.wait(envelope, (delivery,))
        self._deliver_soon()

    @on(ResyncDue)
    def resync_due(self, message: ResyncDue) -> None:
        delivery = self.sinks[message.sink]
        delivery.resync_due |= not delivery.resyncing
        self._deliver_soon()
        if delivery.sink.resync_interval:
            self.after(delivery.sink.resync_interval, message)

    @on(WaitFlushed)
    def wait_flushed(self, message: WaitFlushed, envelope: Envelope[bool]) -> None:
        self._drop_abandoned()
        self.sinks.wait_for(message, envelope)
        self._deliver_soon()

    def _drop_abandoned(self) -> None:
        for envelope in self.sinks.take_abandoned():
            self.answer(envelope, False)

    # -- inspection

    def check_steps(self) -> Iterator[None]:
        return self.ledger.check_steps()

    def check(self) -> None:
        self.ledger.check()


OFF = "the flush notifier is switched off after too many failures: see cache.health()"


class NoNotifier(Actor):
    """In place of a notifier that is switched off: drops every fact, as its successor is sent
    all of them. The ledger has none, for inspection."""

    ROLE: ClassVar[str] = "flush_notifier"

    def __init__(self, ref: ActorRef, *, block_size: int, config: FlushConfig) -> None:
        super().__init__(ref)
        self.ledger = Ledger(block_size, ())
        self.sinks = SinkSet((), self.ledger, config)

    @on(PathCached)
    @on(BlocksAdded)
    @on(BlocksRemoved)
    @on(TierCleared)
    @on(PathsFound)
    @on(NamespaceChanged)
    def fact(self, fact: Report) -> None:
        """Drop a fact."""

    @on(SetIdleLimit)
    def set_idle_limit(self, message: SetIdleLimit) -> None:
        """The successor is made with the limit."""

    @on(WaitFlushed)
    def wait_flushed(self, message: WaitFlushed, envelope: Envelope[bool]) -> None:
        """End a wait for the healthy sinks, as there are none. Refuse a wait for all sinks."""
        if message.healthy:
            self.answer(envelope, True)
        else:
            self.refuse(envelope, SinkError(OFF))

    @on(Resync)
    def resync(self, message: Resync, envelope: Envelope[bool]) -> None:
        self.refuse(envelope, SinkError(OFF))
