"""FlushNotifier: keeps the ledger, and delivers to every sink the differences from its view. No
other actor waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from kvactors.actor import Actor, ActorRef, Envelope, Message, on
from kvactors.config import FlushConfig
from kvactors.flush_notifier.deliver import SinkCaller, SinkDelivery, SinkSet
from kvactors.flush_notifier.ledger import IDLE_LIMIT, Fact, Ledger
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
    RequestScope,
    Resync,
    ResyncDue,
    RetryDue,
    SetIdleLimit,
    TierCleared,
    WaitFlushed,
)
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.flush_notifier.view import SinkFilter


class FlushNotifier(Actor):
    """Owns the ledger and calls the sinks.

    Facts go to the ledger in the order in which they arrive. A large fact runs in steps, and no
    other fact is taken before its last step. Each sink has one call in flight.

    Args:
        sinks: with different names.
        epoch: number of this process. Each incarnation of the actor adds one.
        block_size, idle_limit, token_root: see `Ledger`.
        root_of: root hash of the requests of a namespace and a scope, None for any root.
        namespace: of requests now.
    """

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
        idle_limit: int = IDLE_LIMIT,
        token_root: bytes = b"",
        root_of: Callable[[str, RequestScope], bytes] | None = None,
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
        self._caller = SinkCaller(self, self.sinks, config, self.epoch)
        self._woken = False
        self._unfinished = 0  # facts and deliveries that have steps left

    def started(self) -> None:
        """Call every sink with the new epoch."""
        self._caller.start()
        self._deliver_soon()

    async def stopped(self) -> None:
        """Cancel the calls in flight."""
        self._caller.stop()

    # -- facts

    @on(PathCached)
    @on(BlocksAdded)
    @on(BlocksRemoved)
    @on(TierCleared)
    @on(PathsFound)
    @on(NamespaceChanged)
    def fact(self, fact: Fact) -> None:
        """Blocks are resident, left a tier, or have a path, or other blocks are due."""
        if self.sinks:
            self._work(self.ledger.apply(fact))

    @on(SetIdleLimit)
    def set_idle_limit(self, message: SetIdleLimit) -> None:
        """The device blocks of the cache are set."""
        self.ledger.tree.idle_limit = message.limit

    @on(Continue)
    def continue_work(self, message: Continue) -> None:
        """The next step of a large fact or delivery."""
        self._unfinished -= 1
        self._work(message.work)

    def _work(self, work: Iterator[None]) -> None:
        """Run one step. The next one overtakes every other fact, and other actors may run before
        it. Sinks are called after the last step: half a path in each of two tasks would carry its
        tokens twice."""
        if next(work, self) is None:
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
            for envelope in self.sinks.waiters.take_done():
                self.answer(envelope, True)

    @on(Deliver)
    def deliver(self, message: Deliver) -> None:
        """Send each sink that can be called the differences from its view."""
        self._woken = False
        if not self._unfinished:
            for delivery in self.sinks.begin_calls():
                self._work(self._caller.call(delivery))

    @on(CallLate)
    def call_late(self, message: CallLate) -> None:
        """A call missed its deadline: continue without its answer. The next call comes after its
        end."""
        delivery = self.sinks[message.sink]
        if delivery.is_current(message.number):
            self._work(self._caller.give_up(delivery))

    @on(Delivered)
    def delivered(self, message: Delivered) -> None:
        """A call ended. Its answer counts unless the call missed its deadline before."""
        delivery = self.sinks[message.sink]
        if delivery.is_current(message.number):
            self._work(self._caller.end(delivery, message.error))
        else:
            delivery.stuck = False
            self._deliver_soon()

    @on(RetryDue)
    def retry_due(self, message: RetryDue) -> None:
        """A back-off ended."""
        self.sinks[message.sink].backing_off = False
        self._deliver_soon()

    # -- resync, and the barrier

    @on(Resync)
    def resync(self, message: Resync, envelope: Envelope[bool]) -> None:
        """Send a sink the complete state again. The answer follows when the sink has acknowledged
        it."""
        self._drop_abandoned()
        delivery = self.sinks[message.sink]
        delivery.resync_asks.append(envelope)
        self._send_again(delivery)

    @on(ResyncDue)
    def resync_due(self, message: ResyncDue) -> None:
        """Send a sink its view again: in steps, each after the sink has acknowledged the one
        before, or all of it together if its index must be emptied first."""
        delivery = self.sinks[message.sink]
        if not delivery.sink.repeats:
            self._send_again(delivery)
        else:
            delivery.repeat_due = True
            if not (delivery.in_flight or self._unfinished):
                delivery.repeat_step()
                self._deliver_soon()
        self.after(delivery.repeat_pause(), message)

    def _send_again(self, delivery: SinkDelivery) -> None:
        """Now, or after the call in flight: until then its batch is not in the view."""
        if delivery.in_flight:
            delivery.resync_due = True
        else:
            self._work(self.sinks.resync(delivery))

    @on(WaitFlushed)
    def wait_flushed(self, message: WaitFlushed, envelope: Envelope[bool]) -> None:
        """Answer when the sinks have acknowledged all changes due now."""
        self._drop_abandoned()
        self.sinks.wait(message, envelope)
        self._deliver_soon()

    def _drop_abandoned(self) -> None:
        for envelope in self.sinks.waiters.take_abandoned():
            self.answer(envelope, False)

    # -- inspection

    def check_steps(self) -> Iterator[None]:
        """AssertionError if the ledger is inconsistent. It may change between the steps."""
        return self.ledger.check_steps()

    def check(self) -> None:
        """All steps of `check_steps`."""
        self.ledger.check()
