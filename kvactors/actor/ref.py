"""References to actors, by which other actors and callers send messages. A reference remains valid
across the actor's failures and restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from types import CoroutineType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

import anyio

from kvactors.actor.channel import Channel
from kvactors.actor.instrument import Instruments
from kvactors.actor.message import Ask, Control, Envelope, Later, Message
from kvactors.actor.uncancelled import CANCELLED
from kvactors.errors import ActorFailed, DeadlineExceeded


class Waiters(list[asyncio.Future[None]]):
    """Tasks that wait for a condition, and look again when they are woken."""

    __slots__ = ()

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.append(waiter)
        await waiter

    def wake(self) -> None:
        for waiter in self:
            if not waiter.done():
                waiter.set_result(None)
        self.clear()


class InFlight:
    """A plain count with a way to wait for zero. Every message and job of one system shares one."""

    __slots__ = ("_idle", "begun", "count")

    def __init__(self) -> None:
        self.count = 0
        self.begun = 0  # in all: unchanged between two looks, nothing has happened in between
        self._idle = Waiters()

    def begin(self, n: int = 1) -> None:
        self.count += n
        self.begun += n

    def end(self, n: int = 1) -> None:
        """Remove `n` items of work. At zero every task in `wait_idle` wakes."""
        self.count -= n
        if self.count < 0:
            raise AssertionError("more endings than beginnings")
        if not self.count and self._idle:
            self._idle.wake()

    async def wait_idle(self) -> None:
        """Return when nothing is in flight. The caller sets the deadline (`anyio.fail_after`)."""
        while self.count:
            await self._idle.wait()


if TYPE_CHECKING:
    import typing_extensions

    from kvactors.actor.context import Context
    from kvactors.actor.loop import InlineTurns

    # An unparameterised ActorRef accepts every message.
    M_contra = typing_extensions.TypeVar("M_contra", bound=Message, contravariant=True, default=Any)
else:
    M_contra = TypeVar("M_contra", bound=Message, contravariant=True)

R = TypeVar("R")

Lost: TypeAlias = Callable[[R], None] | None
"""Called with an answer that does not reach its asker."""

SWEEP = 0.05
"""Seconds between checks of the deadlines of open asks: a timer for each would double the cost of
an ask."""


class OpenAsks(Generic[R]):
    """The unanswered asks of one ref, ended at their deadlines (to within two sweeps)."""

    __slots__ = ("_actor", "_overdue", "open", "timer")

    def __init__(self, actor: str) -> None:
        self._actor = actor
        self.open: dict[asyncio.Future[Any], Envelope[Any]] = {}
        # A dict for the order in which they were asked: a run must repeat from its seed.
        self._overdue: dict[asyncio.Future[Any], None] = {}
        self.timer: asyncio.TimerHandle | None = None

    def start_timer(self) -> None:
        self.timer = asyncio.get_running_loop().call_later(SWEEP, self._sweep)

    def _sweep(self) -> None:
        self.timer = None
        if self.open:
            self.start_timer()
        now = asyncio.get_running_loop().time()
        overdue = [
            reply
            for reply, envelope in self.open.items()
            if envelope.deadline is not None and envelope.deadline <= now
        ]
        twice = [reply for reply in overdue if reply in self._overdue]
        for reply in twice:  # until the second look the actor may still refuse in better words
            if not reply.done():
                message = type(self.open[reply].message).__name__
                reply.set_exception(
                    DeadlineExceeded(f"{self._actor} did not answer {message} in time")
                )
        self._overdue = dict.fromkeys(overdue)

    def __len__(self) -> int:
        """Asks without an answer. One whose asker has not taken its answer yet is not counted."""
        return sum(not reply.done() for reply in self.open)


class ActorRef(Generic[M_contra]):
    """A reference to an actor that handles messages of the type `M_contra`, usually a union.

    Attributes:
        role: the class of actor, as the channel graph names it (a pool shares one role).
        switched_off: whether a substitute runs in the actor's place.
        make_context: makes the context of each incarnation in place of `Context`, for tests.
        entrance: begins an ask: the inline turns of an actor that runs, else this ref.
    """

    def __init__(
        self,
        name: str,
        role: str,
        channel: Channel[Envelope[Any]],
        in_flight: InFlight,
        instruments: Instruments | None = None,
    ) -> None:
        self.name = name
        self.role = role
        self.channel = channel
        self.in_flight = in_flight
        self.instruments = instruments or Instruments()
        self.incarnation = 0
        self.switched_off = False
        self.make_context: Callable[[ActorRef], Context] | None = None
        self._asks: OpenAsks[Any] = OpenAsks(name)
        self._restarting = 0
        self.entrance: ActorRef[Any] | InlineTurns = self
        self.failure_pending = False  # and the other actors are not notified yet

    def begin_restart(self) -> None:
        """The actor has failed or restarts: the system is not idle before its next incarnation."""
        self._restarting += 1
        self.in_flight.begin()

    def end_restart(self) -> None:
        count, self._restarting = self._restarting, 0
        self.in_flight.end(count)

    def try_tell(self, message: M_contra) -> bool:
        """Put a message; False if the data lane is full. Control messages fit. ChannelClosed."""
        return self.try_send(Envelope(message, None, None, self.incarnation))

    async def tell(self, message: M_contra) -> None:
        """Put a message, waiting while the data lane is full. ChannelClosed."""
        await self.send(Envelope(message, None, None, self.incarnation))

    async def ask(
        self, message: Ask[R], *, deadline: float, lost: Lost[R] = None, queued: bool = False
    ) -> R:
        """Put an ask and wait for its answer.

        deadline: absolute loop time. It covers the wait for a place and the wait for the answer,
        and travels with the message. Raises DeadlineExceeded, ActorFailed, ChannelClosed, and any
        error that the actor answers with. A cancelled ask is withdrawn: if the actor has not begun
        with it, it never will.

        lost: called with an answer that does not reach the caller, because it was cancelled after
        the actor had answered.

        queued: it waits in the channel, and not for a pass with inline turns: no later ask
        overtakes it.
        """
        asked = self.entrance.begin_ask(message, deadline, lost, queued=queued)
        return await asked if isinstance(asked, CoroutineType) else asked

    def begin_ask(
        self, message: Ask[R], deadline: float, lost: Lost[R] = None, *, queued: bool = False
    ) -> R | CoroutineType[Any, Any, R]:
        """`ask` up to its first wait, through the channel. By `entrance.begin_ask` an ask may be
        answered at once. Returns a coroutine to be awaited in the same step, or of `entrance` the
        answer."""
        reply: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        envelope = Envelope(message, reply, deadline, self.incarnation)
        return self.wait_answer(envelope, lost, taken=False)

    def wait_answer(
        self, envelope: Envelope[R], lost: Lost[R], *, taken: bool
    ) -> CoroutineType[Any, Any, R]:
        """Wait for the answer of an ask. taken: it does not go through the channel."""
        return cast("CoroutineType[Any, Any, R]", self._answer(envelope, lost, taken=taken))

    async def _answer(self, envelope: Envelope[R], lost: Lost[R], *, taken: bool) -> R:
        asks, deadline, reply = (
            self._asks,
            envelope.deadline,
            cast("asyncio.Future[R]", envelope.reply),
        )
        try:
            if not taken and not self.try_send(envelope):
                with anyio.CancelScope(deadline=inf if deadline is None else deadline):
                    await self.send(envelope)
                    asks.open[reply] = envelope
                    if asks.timer is None:
                        asks.start_timer()
                    return await reply
                if reply.done() and not reply.cancelled():
                    return reply.result()  # answered in the step in which the deadline passed
                message = type(envelope.message).__name__
                raise DeadlineExceeded(f"{self.name} did not take {message} in time")
            asks.open[reply] = envelope
            if asks.timer is None:
                asks.start_timer()
            return await reply
        except CANCELLED:
            reply.cancel()  # a closed coroutine, other than a cancelled one, leaves it as it is
            if lost is not None and not reply.cancelled() and reply.exception() is None:
                lost(reply.result())
            raise
        finally:
            asks.open.pop(reply, None)

    def try_send(self, envelope: Envelope[Any]) -> bool:
        if isinstance(envelope.message, Control):
            put = (
                self.channel.put_later
                if isinstance(envelope.message, Later)
                else self.channel.put_control
            )
            put(envelope)
        elif not self.channel.try_put(envelope):
            return False
        self.in_flight.begin()
        if self.instruments.active:
            self.instruments.notify("sent", self, envelope, self.instruments.turn)
        return True

    async def send(self, envelope: Envelope[Any]) -> None:
        self.in_flight.begin()  # its sender may wait for a place
        try:
            await self.channel.put(envelope)
        except BaseException:
            self.in_flight.end()
            raise
        if self.instruments.active:
            self.instruments.notify("sent", self, envelope, None)

    def reply(self, envelope: Envelope[R], value: R) -> bool:
        """Answer an ask that was sent to this actor. False if its asker no longer waits."""
        if envelope.reply is None or envelope.reply.done():
            return False
        envelope.reply.set_result(value)
        if self.instruments.active:
            self.instruments.notify("answered", self, envelope, value, None)
        return True

    def reply_error(self, envelope: Envelope[Any], error: Exception) -> bool:
        """Answer an ask with an error. False if its asker no longer waits."""
        if envelope.reply is None or envelope.reply.done():
            return False
        envelope.reply.set_exception(error)
        if self.instruments.active:
            self.instruments.notify("answered", self, envelope, None, error)
        return True

    def fail_with_actor(
        self, envelope: Envelope[Any], name: str, cause: BaseException | None
    ) -> None:
        """Fail an ask because actor `name` failed. No effect on a message that is not one."""
        if envelope.reply is not None:
            self.reply_error(envelope, ActorFailed(name, cause))

    def purge(self, error: Callable[[], Exception]) -> None:
        """Drop every queued message. Asks among them fail with the exception that `error` makes."""
        for envelope in self.channel.purge():
            if self.instruments.active:
                self.instruments.notify("dropped", self, envelope)
            self.reply_error(envelope, error())
            self.in_flight.end()

    @property
    def open_asks(self) -> int:
        return len(self._asks)
