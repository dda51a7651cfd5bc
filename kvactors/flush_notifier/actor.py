"""FlushNotifier: keeps the ledger and brings every sink to believe what is true. Nobody waits for
it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from kvactors.actor import Actor, ActorRef, Envelope, Message, on
from kvactors.actor.clock import now
from kvactors.actor.log import described
from kvactors.config import FlushConfig
from kvactors.flush_notifier.checks import Tiers, divergence_steps
from kvactors.flush_notifier.deliveries import Delivery, SinkHealth, SinkStatistics, start_call
from kvactors.flush_notifier.ledger import LIMBO, Ledger
from kvactors.flush_notifier.messages import (
    Announced,
    CallLate,
    Cleared,
    Continue,
    Deliver,
    Delivered,
    FlushTask,
    Gained,
    Gone,
    Named,
    Origin,
    Resync,
    ResyncDue,
    RetryDue,
    Scoped,
    Settle,
)
from kvactors.flush_notifier.resync import pause
from kvactors.flush_notifier.runs import Batch, Steps, finish
from kvactors.flush_notifier.scopes import rescope
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.types import Tier


class Settling(NamedTuple):
    """Who waits. marks: of each sink, the ledger's clock that it must reach (None: known when the
    call under way is over)."""

    envelope: Envelope[bool]
    marks: dict[int, int | None]


class FlushNotifier(Actor):
    """Owns the ledger. epoch: number of this process's life; each life of the actor counts one
    further. limbo, token_root: see `Ledger`."""

    ROLE: ClassVar[str] = "flush_notifier"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {}

    def __init__(
        self,
        ref: ActorRef,
        *,
        block_size: int,
        sinks: Sequence[Sink],
        config: FlushConfig,
        epoch: int,
        limbo: int = LIMBO,
        token_root: bytes = b"",
        root_of: Callable[[str, Origin], bytes] | None = None,
        namespace: str = "",
    ) -> None:
        super().__init__(ref)
        self.epoch = epoch + ref.life
        self.config = config
        takes_clear = [i for i, sink in enumerate(sinks) if sink.takes_clear]
        by_name = [i for i, sink in enumerate(sinks) if sink.by_name]
        full = [i for i, sink in enumerate(sinks) if sink.announces_full]
        views = [sink.view_of for sink in sinks]
        self.ledger = Ledger(
            block_size, views, limbo, takes_clear, by_name, token_root=token_root, full=full
        )
        self._root_of, self.ledger.root_of = root_of, root_of and partial(root_of, namespace)
        self.deliveries = [Delivery(sink, config.retry_min) for sink in sinks]
        self._by_name = {delivery.sink.name: i for i, delivery in enumerate(self.deliveries)}
        self._settling: list[Settling] = []
        self._woken = False
        self._unfinished = 0  # facts of which there are steps to come

    def started(self) -> None:
        """Every sink is called with the new epoch first. A call of an earlier incarnation that has
        not ended is waited for."""
        for delivery in self.deliveries:
            call = delivery.sink.call
            if call is not None and not call.done():
                delivery.stuck = True
                self._report_end(delivery, call, -1)
            if delivery.sink.resync_interval:
                self.after(delivery.sink.resync_interval, ResyncDue(delivery.sink.name))
        self._pump()

    async def stopped(self) -> None:
        """Cancel the calls in flight, and wait for none: the next incarnation does, or the close of
        the sink."""
        for delivery in self.deliveries:
            if delivery.timer is not None:
                delivery.timer.cancel()
            if delivery.in_flight and delivery.sink.call is not None:
                delivery.sink.call.cancel()

    # -- facts

    @on(Announced)
    def announced(self, message: Announced) -> None:
        """Blocks of a path are resident."""
        if self.deliveries:
            self._work(self.ledger.announce(message))

    @on(Gained)
    def gained(self, message: Gained) -> None:
        """Names are resident."""
        if self.deliveries:
            self._work(self.ledger.gain(message.keys, message.tier, message.reason))

    @on(Named)
    def named(self, message: Named) -> None:
        """Blocks that were found in storage, with their paths."""
        if self.deliveries:
            self._work(self.ledger.name(message))

    @on(Gone)
    def gone(self, message: Gone) -> None:
        """Names left a tier."""
        if self.deliveries:
            self._work(self.ledger.lose(message.keys, message.tier, message.reason))

    @on(Cleared)
    def cleared(self, message: Cleared) -> None:
        """A tier is empty."""
        self._work(self.ledger.clear(message.tier, message.reason))

    @on(Scoped)
    def scoped(self, message: Scoped) -> None:
        """The namespace of requests changed: other blocks are to be announced."""
        if self.deliveries and self._root_of is not None:
            self._work(rescope(self.ledger, partial(self._root_of, message.namespace)))

    @on(Continue)
    def go_on(self, message: Continue) -> None:
        """The next step of something large."""
        self._unfinished -= 1
        self._work(message.work)

    def _work(self, work: Iterator[None]) -> None:
        """Do a step. The next one overtakes every other fact, and yet others than this actor may
        run before it. Sinks are told when all is done: half a path in one task and half in the next
        would carry its tokens twice."""
        if next(work, self) is None:
            self._unfinished += 1
            self.to_self(Continue(work))
        else:
            self._pump()

    # -- deliveries

    def _pump(self) -> None:
        for i, delivery in enumerate(self.deliveries):
            if self.ledger.pending(i) and delivery.since is None:
                delivery.since = now()
            if not (self._woken or self._unfinished) and delivery.ready(self.ledger.pending(i)):
                self._woken = True  # the turns that are due come first: one batch for them all
                asyncio.get_running_loop().call_soon(self.to_self, Deliver())
        if self._settling:
            self._answer_settled()

    @on(Deliver)
    def deliver(self, message: Deliver) -> None:
        """Tell every sink that can take something what differs for it."""
        self._woken = False
        if self._unfinished:
            return
        ready = [
            (i, delivery)
            for i, delivery in enumerate(self.deliveries)
            if delivery.ready(self.ledger.pending(i))
        ]
        for _, delivery in ready:
            delivery.in_flight = True
        for i, delivery in ready:
            self._work(self._deliver(i, delivery))

    def _deliver(self, i: int, delivery: Delivery) -> Iterator[None]:
        """Call a sink: with the epoch, or with what differs."""
        if delivery.begun:
            delivery.batch = yield from self.ledger.taking(i, self.config.batch, self.epoch)
        delivery.number += 1
        call = start_call(
            delivery.sink,
            partial(self._call, delivery.sink, i, tuple(delivery.batch.tasks), delivery.begun),
        )
        self._report_end(delivery, call, delivery.number)
        delivery.timer = self.after(
            self.config.timeout, CallLate(delivery.sink.name, delivery.number)
        )

    async def _call(self, sink: Sink, i: int, tasks: tuple[FlushTask, ...], begun: bool) -> None:
        if begun:
            sink.taken = 0
            await sink.deliver(tasks)
        else:
            sink.attach(partial(self.ledger.holdings, i))
            await sink.begin(self.epoch)

    def _report_end(self, delivery: Delivery, call: asyncio.Task[str], number: int) -> None:
        name = delivery.sink.name

        def ended(call: asyncio.Task[str]) -> None:
            error = (
                "cancelled"
                if call.cancelled()
                else call.result()
                if call.exception() is None
                else repr(call.exception())
            )
            self.to_self(Delivered(name, number, error))

        call.add_done_callback(ended)

    @on(CallLate)
    def call_late(self, message: CallLate) -> None:
        """A call's time is over: cancel it and go on without its answer. The next call comes when
        it has ended."""
        i = self._by_name[message.sink]
        delivery = self.deliveries[i]
        if delivery.in_flight and message.number == delivery.number:
            delivery.stuck = True
            if delivery.sink.call is not None:
                delivery.sink.call.cancel()
            self._end_call(i, delivery, f"no answer within {self.config.timeout} s")

    @on(Delivered)
    def delivered(self, message: Delivered) -> None:
        """A call to a sink has ended: its answer counts if it was not given up before."""
        i = self._by_name[message.sink]
        delivery = self.deliveries[i]
        if delivery.in_flight and message.number == delivery.number:
            self._end_call(i, delivery, message.error)
        else:
            delivery.stuck = False
            self._pump()

    def _end_call(self, i: int, delivery: Delivery, error: str) -> None:
        """The sink took the batch, or back off and try again with what differs then."""
        delivery.number += 1  # what else comes of this call is late
        if delivery.timer is not None:
            delivery.timer.cancel()
        name = delivery.sink.name
        if error:
            if delivery.failed(error):
                self.log.warning("sink fails", sink=name, error=error, again_in=delivery.delay)
            delivery.waiting = True
            self.after(delivery.delay, RetryDue(name))
            delivery.delay = min(2 * delivery.delay, self.config.retry_max)
        elif (failed_for := delivery.took(self.config.retry_min)) is not None:
            self.log.info(
                "sink works again",
                sink=name,
                failed_for=round(failed_for, 3),
                last_error=delivery.last_error,
            )
        self._work(self._over(i, delivery, failed=bool(error)))

    def _over(self, i: int, delivery: Delivery, *, failed: bool) -> Iterator[None]:
        """The ledger's part of the end of a call."""
        taken, rest = delivery.split() if failed else (delivery.batch, None)
        yield from self.ledger.delivering(i, taken)
        delivery.count(taken.tasks)
        if rest is not None:
            yield from self.ledger.refusing(i, rest)
        if delivery.anew:
            yield from self._again(i, delivery)
        self._step_again(i, delivery)
        sent_again = bool(delivery.batch.cleared)
        delivery.in_flight = False
        if not delivery.failures:
            delivery.since = now() if self.ledger.pending(i) else None
        delivery.batch = Batch([], [])
        for one in self._settling:
            if i in one.marks and (one.marks[i] is None or sent_again):
                one.marks[i] = self.ledger.clock

    @on(RetryDue)
    def retry_due(self, message: RetryDue) -> None:
        """A back-off is over."""
        self.deliveries[self._by_name[message.sink]].waiting = False
        self._pump()

    # -- everything again

    @on(Resync)
    def resync(self, message: Resync, envelope: Envelope[bool]) -> None:
        """Send a sink everything again; answer when it has taken that."""
        self._drop_abandoned()
        i = self._by_name[message.sink]
        self.deliveries[i].asks.append(envelope)
        self._send_again(i)

    @on(ResyncDue)
    def resync_due(self, message: ResyncDue) -> None:
        """Send a sink again what it was sent: step by step, each when it has taken the ones before;
        or at once, if its index must forget first."""
        i = self._by_name[message.sink]
        delivery, wait = self.deliveries[i], self.deliveries[i].sink.resync_interval
        if not delivery.sink.repeats:
            self._send_again(i)
        else:
            delivery.step = True
            if not (delivery.in_flight or self._unfinished):
                self._step_again(i, delivery)
                self._pump()
            if delivery.step or delivery.repeat is not None:
                wait = pause(wait, len(self.ledger.entries), self.ledger.step)
        self.after(wait, message)

    def _step_again(self, i: int, delivery: Delivery) -> None:
        """A step of a slow repetition. Not while a call is in flight: what that brings to the index
        may be lost before the step."""
        if delivery.step and self.ledger.pending(i) < self.config.batch:
            delivery.step = False
            delivery.repeat = delivery.repeat or self.ledger.repeat(i)
            if next(delivery.repeat, self) is self:
                delivery.repeat = None
                delivery.resyncs += 1

    def _send_again(self, i: int) -> None:
        """Now, or when the call in flight is over: until then its batch is not in the ledger's
        view."""
        delivery = self.deliveries[i]
        if delivery.in_flight:
            delivery.anew = True
        else:
            self._work(self._again(i, delivery))

    def _again(self, i: int, delivery: Delivery) -> Iterator[None]:
        delivery.anew = False
        if delivery.sink.repeats:
            yield from self.ledger.repeat(i)
        else:
            delivery.begun = False
            yield from self.ledger.forget(i)
        delivery.resyncs += 1
        self._settling += [Settling(envelope, {i: self._mark(i)}) for envelope in delivery.asks]
        delivery.asks.clear()

    # -- the barrier

    @on(Settle)
    def settle(self, message: Settle, envelope: Envelope[bool]) -> None:
        """Answer once every sink believes what is due as of now. Askers who gave up since are
        forgotten here."""
        self._drop_abandoned()
        asked = [
            i
            for i, d in enumerate(self.deliveries)
            if message.sinks is None or d.sink.name in message.sinks
        ]
        sinks = [i for i in asked if not (message.healthy and self.deliveries[i].failures)]
        self._settling.append(Settling(envelope, {i: self._mark(i) for i in sinks}))
        self._pump()

    def _drop_abandoned(self) -> None:
        """Forget those who wait no longer."""
        given_up = [one for one in self._settling if one.envelope.abandoned]
        self._settling = [one for one in self._settling if not one.envelope.abandoned]
        for one in given_up:
            self.answer(one.envelope, False)

    def _mark(self, i: int) -> int | None:
        """What is under way may be out of date already: then what it leaves to be corrected is
        known when it is over."""
        return None if self.deliveries[i].in_flight else self.ledger.clock

    def _answer_settled(self) -> None:
        done = [
            one
            for one in self._settling
            if all(self._reached(i, mark) for i, mark in one.marks.items())
        ]
        for one in done:
            self._settling.remove(one)
            self.answer(one.envelope, True)

    def _reached(self, i: int, mark: int | None) -> bool:
        delivery = self.deliveries[i]
        settled = (
            delivery.begun and not delivery.batch.cleared
        )  # after a clear, what came back meanwhile is told again
        return mark is not None and settled and self.ledger.told_until(i) >= mark

    # -- for inspection

    def divergence(self, truth: Tiers, sinks: Collection[str] | None = None) -> int:
        """Blocks on which a sink's view (of those named, of all if None) and what is announceable
        of the given tiers differ.

        Not announceable are blocks whose path was never announced (see `unnamed`), blocks whose
        path is interrupted (see `Ledger`), and gains that are due to a sink when the request
        finishes."""
        return finish(self.divergence_steps(truth, sinks))

    def divergence_steps(self, truth: Tiers, sinks: Collection[str] | None = None) -> Steps[int]:
        """The same in steps, to compare at rest: what changes between two steps may or may not
        count."""
        chosen = [i for i, d in enumerate(self.deliveries) if sinks is None or d.sink.name in sinks]
        mirrors = {i: mirror for i in chosen if (mirror := self._mirror(i)) is not None}
        return divergence_steps(self.ledger, chosen, mirrors, truth)

    def unnamed(self) -> int:
        """Resident blocks whose path was never announced."""
        return len(self.ledger.unnamed)

    def _mirror(self, i: int) -> Tiers | None:
        """A sink's own account of its view, None if it has none: `live_view` if there is one, since
        `view()` is a copy of everything."""
        sink: Any = self.deliveries[i].sink
        try:
            held: Any = getattr(sink, "live_view", None)
            if held is None and (view := getattr(sink, "view", None)) is not None:
                held = view()
            return None if held is None else {Tier(int(tier)): keys for tier, keys in held.items()}
        except Exception as error:
            self.log.warning("sink has no view to compare", sink=sink.name, error=described(error))
            return None

    def check_steps(self) -> Iterator[None]:
        """AssertionError if the ledger is not consistent. In steps, between which anything may
        happen."""
        return self.ledger.check_steps()

    def check(self) -> None:
        """All steps of `check_steps` at once."""
        self.ledger.check()

    def flush_statistics(self) -> tuple[SinkStatistics, ...]:
        """A moment's picture of every sink."""
        ledger = self.ledger
        return tuple(
            d.statistics(ledger.pending(i), ledger.coalesced[i])
            for i, d in enumerate(self.deliveries)
        )

    def sink_health(self) -> tuple[SinkHealth, ...]:
        """Of every sink whether its last call succeeded, and if not, why and since when."""
        return tuple(
            delivery.health(self.ledger.pending(i)) for i, delivery in enumerate(self.deliveries)
        )
