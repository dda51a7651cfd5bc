"""FlushNotifier: keeps the ledger and brings every sink to believe what is true. Nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import anyio

from kvactors.actor import Actor, ActorRef, Envelope, Message, on
from kvactors.actor.clock import now
from kvactors.config import FlushConfig
from kvactors.flush_notifier.ledger import LIMBO, Ledger
from kvactors.flush_notifier.messages import (
    Announced,
    Cleared,
    Continue,
    Deliver,
    Delivered,
    FlushTask,
    Gained,
    Gone,
    RetryDue,
    Settle,
)
from kvactors.flush_notifier.runs import Batch
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.units import Residency, Tier


class SinkStatistics(NamedTuple):
    """A moment's picture of one sink."""

    name: str
    pending: int  # blocks on which it does not believe what is due
    delivered: int  # tasks it took
    resident: int  # of those, tasks that said resident
    gone: int
    blocks: int  # blocks in them
    retried: int
    coalesced: int  # differences that vanished before they were told
    oldest_pending_age: float  # seconds
    in_flight: bool


class Delivery:
    """One sink's side of the notifier: what is under way to it, and when it may be tried again."""

    __slots__ = (
        "batch", "begun", "blocks", "delay", "delivered", "failures", "gone", "in_flight", "resident", "retried", "since", "sink", "waiting",
    )  # fmt: skip

    def __init__(self, sink: Sink, delay: float) -> None:
        self.sink = sink
        self.delay = delay
        self.begun = self.in_flight = self.waiting = False
        self.batch = Batch([], [])
        self.since: float | None = None  # since when something has been pending
        self.failures = 0  # in a row
        self.delivered = self.resident = self.gone = self.blocks = self.retried = 0

    def count(self, tasks: Sequence[FlushTask]) -> None:
        """The sink took these."""
        self.delivered += len(tasks)
        for task in tasks:
            self.blocks += task.count
            self.resident += task.residency is Residency.RESIDENT
            self.gone += task.residency is Residency.GONE

    @property
    def ailing(self) -> bool:
        """Whether its last call failed."""
        return self.failures > 0


class Settling(NamedTuple):
    """Who waits. marks: of each sink, the ledger's clock that it must reach (None: known when the call under way is over)."""

    envelope: Envelope[bool]
    marks: dict[int, int | None]


class FlushNotifier(Actor):
    """Owns the ledger. epoch: number of this process's life; each life of the actor counts one further. limbo: see `Ledger`."""

    ROLE: ClassVar[str] = "flush_notifier"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {}

    def __init__(
        self, ref: ActorRef, *, block_size: int, sinks: Sequence[Sink], config: FlushConfig, epoch: int, limbo: int = LIMBO
    ) -> None:
        super().__init__(ref)
        self.epoch = epoch + ref.life
        self.config = config
        takes_clear = [i for i, sink in enumerate(sinks) if sink.takes_clear]
        by_name = [i for i, sink in enumerate(sinks) if sink.by_name]
        self.ledger = Ledger(block_size, [sink.view_of for sink in sinks], limbo, takes_clear, by_name)
        self.deliveries = [Delivery(sink, config.retry_min) for sink in sinks]
        self._by_name = {delivery.sink.name: i for i, delivery in enumerate(self.deliveries)}
        self._settling: list[Settling] = []
        self._woken = False
        self._unfinished = 0  # facts of which there are steps to come

    def started(self) -> None:
        """Every sink first hears that a new epoch began."""
        for i, delivery in enumerate(self.deliveries):
            delivery.sink.attach(partial(self.ledger.holdings, i))
        self._pump()

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

    @on(Gone)
    def gone(self, message: Gone) -> None:
        """Names left a tier."""
        if self.deliveries:
            self._work(self.ledger.lose(message.keys, message.tier, message.reason))

    @on(Cleared)
    def cleared(self, message: Cleared) -> None:
        """A tier is empty."""
        self._work(self.ledger.clear(message.tier, message.reason))

    @on(Continue)
    def go_on(self, message: Continue) -> None:
        """The next step of something large."""
        self._unfinished -= 1
        self._work(message.work)

    def _work(self, work: Iterator[None]) -> None:
        """Do a step. The next one overtakes every other fact, and yet others than this actor may run before it. Sinks are told when all
        is done: half a path in one task and half in the next would carry its tokens twice."""
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
            if not (self._woken or self._unfinished) and self._ready(i, delivery):
                self._woken = True  # the turns that are due come first: one batch for them all
                asyncio.get_running_loop().call_soon(self.to_self, Deliver())
        if self._settling:
            self._answer_settled()

    def _ready(self, i: int, delivery: Delivery) -> bool:
        return not (delivery.in_flight or delivery.waiting) and (bool(self.ledger.pending(i)) or not delivery.begun)

    @on(Deliver)
    def deliver(self, message: Deliver) -> None:
        """Tell every sink that can take something what differs for it."""
        self._woken = False
        if self._unfinished:
            return
        for i, delivery in enumerate(self.deliveries):
            if self._ready(i, delivery):
                self._deliver(i, delivery)

    def _deliver(self, i: int, delivery: Delivery) -> None:
        if delivery.begun:
            delivery.batch = self.ledger.take(i, self.config.batch, self.epoch)
        delivery.in_flight = True
        name = delivery.sink.name

        def failed(error: Exception) -> Delivered:
            return Delivered(name, False, repr(error))

        self.start_job(self._call(delivery), lambda _: Delivered(name, True, ""), failed, counted=False)

    async def _call(self, delivery: Delivery) -> None:
        with anyio.fail_after(self.config.timeout):
            if delivery.begun:
                delivery.sink.taken = 0
                await delivery.sink.deliver(delivery.batch.tasks)
            else:
                await delivery.sink.begin(self.epoch)

    @on(Delivered)
    def delivered(self, message: Delivered) -> None:
        """A call to a sink is over: believe it, or back off and try again with what differs then."""
        i = self._by_name[message.sink]
        delivery = self.deliveries[i]
        if not message.ok:
            taken, rest = delivery.batch.split(delivery.sink.taken)
            self.ledger.delivered(i, taken)
            delivery.count(taken.tasks)
            self.ledger.refused(i, rest)
            delivery.retried += 1
            delivery.failures += 1
            delivery.waiting = True
            self.log.warning("sink did not take a batch", sink=message.sink, error=message.error, again_in=delivery.delay)
            self.after(delivery.delay, RetryDue(message.sink))
            delivery.delay = min(2 * delivery.delay, self.config.retry_max)
        else:
            delivery.begun, delivery.delay, delivery.failures = True, self.config.retry_min, 0
            self.ledger.delivered(i, delivery.batch)
            delivery.count(delivery.batch.tasks)
        self._work(self._over(i, delivery, cleared=message.ok))

    def _over(self, i: int, delivery: Delivery, *, cleared: bool) -> Iterator[None]:
        """The end of a call; if it said that everything is gone, that takes some time."""
        if cleared:
            yield from self.ledger.cleared(i, delivery.batch)
        told_again = bool(delivery.batch.cleared)
        delivery.in_flight = False
        if not delivery.failures:
            delivery.since = now() if self.ledger.pending(i) else None
        delivery.batch = Batch([], [])
        for one in self._settling:
            if i in one.marks and (one.marks[i] is None or told_again):
                one.marks[i] = self.ledger.clock

    @on(RetryDue)
    def retry_due(self, message: RetryDue) -> None:
        """A back-off is over."""
        self.deliveries[self._by_name[message.sink]].waiting = False
        self._pump()

    @on(Settle)
    def settle(self, message: Settle, envelope: Envelope[bool]) -> None:
        """Answer once every sink believes what is due as of now. Askers who gave up since are forgotten here."""
        given_up = [one for one in self._settling if one.envelope.abandoned]
        self._settling = [one for one in self._settling if not one.envelope.abandoned]
        for one in given_up:
            self.answer(one.envelope, False)
        asked = [i for i, d in enumerate(self.deliveries) if message.sinks is None or d.sink.name in message.sinks]
        sinks = [i for i in asked if not (message.healthy and self.deliveries[i].ailing)]
        self._settling.append(Settling(envelope, {i: self._mark(i) for i in sinks}))
        self._pump()

    def _mark(self, i: int) -> int | None:
        """What is under way may be out of date already: then what it leaves to be corrected is known when it is over."""
        return None if self.deliveries[i].in_flight else self.ledger.clock

    def _answer_settled(self) -> None:
        done = [one for one in self._settling if all(self._reached(i, mark) for i, mark in one.marks.items())]
        for one in done:
            self._settling.remove(one)
            self.answer(one.envelope, True)

    def _reached(self, i: int, mark: int | None) -> bool:
        delivery = self.deliveries[i]
        settled = delivery.begun and not delivery.batch.cleared  # after a clear, what came back meanwhile is told again
        return mark is not None and settled and self.ledger.told_until(i) >= mark

    # -- for inspection

    def divergence(self, truth: Mapping[Tier, set[bytes]], sinks: Collection[str] | None = None) -> int:
        """Blocks on which a sink's view (of those named, of all if None) and the given tiers differ.

        Blocks whose path was never announced are not counted (see `unnamed`): no sink can know of them; nor gains that a sink does
        not want to hear before the request finishes."""
        tiers_of: dict[bytes, int] = {}
        for tier, keys in truth.items():
            bit = int(tier)
            for key in keys:
                tiers_of[key] = tiers_of.get(key, 0) | bit
        differing: set[bytes] = set()
        for i, view in enumerate(self.ledger.views):
            if sinks is not None and self.deliveries[i].sink.name not in sinks:
                continue
            table, believed = view.table(), self._believed(i)
            for key in tiers_of.keys() | believed.keys():
                entry, expected = self.ledger.entries.get(key), table[tiers_of.get(key, 0)]
                if view.at_finish and entry is not None and not entry.finished:
                    expected &= believed.get(key, 0)
                if expected != believed.get(key, 0) and (entry is not None or key in believed):
                    differing.add(key)
        return len(differing)

    def unnamed(self) -> int:
        """Resident blocks whose path was never announced."""
        return len(self.ledger.unnamed)

    def _believed(self, i: int) -> dict[bytes, int]:
        """What a sink says it believes, if it can say so; else what it was told."""
        view: Any = getattr(self.deliveries[i].sink, "view", None)
        if view is None:
            return dict(self.ledger.believed(i))
        mirror: dict[bytes, int] = {}
        for tier, keys in view().items():
            for key in keys:
                mirror[key] = mirror.get(key, 0) | int(tier)
        return mirror

    def check(self) -> None:
        """AssertionError if the ledger is not consistent."""
        self.ledger.check()

    def flush_statistics(self) -> tuple[SinkStatistics, ...]:
        """A moment's picture of every sink."""
        return tuple(
            SinkStatistics(
                d.sink.name, self.ledger.pending(i), d.delivered, d.resident, d.gone, d.blocks, d.retried, self.ledger.coalesced[i],
                now() - d.since if d.since is not None else 0.0, d.in_flight,
            )
            for i, d in enumerate(self.deliveries)
        )  # fmt: skip
