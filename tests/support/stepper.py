"""Stepper: one actor, turn by turn, without any other actor. A turn is synchronous, so a test is
too: message in, effects out."""

from __future__ import annotations

import asyncio
from asyncio.events import _get_running_loop, _set_running_loop
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, NamedTuple, Self, TypeVar

from kvactors.actor import (
    Actor,
    ActorRef,
    Ask,
    Channel,
    Context,
    Control,
    Envelope,
    InFlight,
    Message,
    State,
)
from kvactors.testing.loop import SimLoop

A = TypeVar("A", bound=Actor)
T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Told(NamedTuple):
    """A message that a turn sent, and its receiver (the actor's name for a message to itself)."""

    receiver: str
    message: Message


class Answered(NamedTuple):
    """An ask that was answered: with a value, or with an error (then `value` is None)."""

    message: Message
    value: Any
    error: BaseException | None


class Job(NamedTuple):
    """A child job that a turn started. It does not run: `Stepper.finish` and `Stepper.fail` set
    its result."""

    coroutine: Coroutine[Any, Any, Any]
    done: Callable[[Any], Control]
    failed: Callable[[Exception], Control]


class Timer(NamedTuple):
    """A control message the actor will be sent at `when` (the stepper's seconds), unless `handle`
    is cancelled by then."""

    when: float
    message: Control
    handle: asyncio.TimerHandle


class Effects(NamedTuple):
    """All that came of a turn, each in order."""

    told: tuple[Told, ...] = ()
    answered: tuple[Answered, ...] = ()
    jobs: tuple[Job, ...] = ()
    timers: tuple[Timer, ...] = ()

    def to(self, receiver: ActorRef | str) -> list[Message]:
        """The messages sent to one receiver."""
        name = receiver if isinstance(receiver, str) else receiver.name
        return [told.message for told in self.told if told.receiver == name]

    def then(self, later: Effects) -> Effects:
        """These and those of a later turn together."""
        return Effects(
            self.told + later.told,
            self.answered + later.answered,
            self.jobs + later.jobs,
            self.timers + later.timers,
        )


class SteppedContext(Context):
    """Keeps the effects of a turn for the stepper in place of carrying them out."""

    def __init__(self, clock: SimLoop, ref: ActorRef) -> None:
        super().__init__(ref)
        self._clock = clock
        self.told: list[Told] = []
        self.started: list[Job] = []
        self.set_timers: list[Timer] = []

    def tell(self, to: ActorRef[M], message: M) -> None:
        """See `Context.tell`."""
        self.told.append(Told(to.name, message))

    def start_job(
        self,
        job: Coroutine[Any, Any, T],
        done: Callable[[T], Control],
        failed: Callable[[Exception], Control],
        **_: Any,
    ) -> None:
        """See `Context.start_job`."""
        self.started.append(Job(job, done, failed))

    def after(self, delay: float, message: Control) -> Any:
        """See `Context.after`. Returns a handle of the stepper's clock, which is cancelled like
        one."""
        when = self._clock.time() + delay
        handle = asyncio.TimerHandle(when, lambda: None, [], self._clock)
        self.set_timers.append(Timer(when, message, handle))
        return handle


class Stepper(Generic[A]):
    """Makes an actor with `factory(ref)` and holds its clock. Its state is in `actor`, what
    `started` did in `started`.

    Refs that the actor needs of others are `effects.receiver`s. It works with and without a running
    loop. Jobs that were never run are disposed of when it is closed, or goes.
    """

    def __init__(
        self, factory: Callable[[ActorRef], A], name: str = "stepped", *, incarnation: int = 0
    ) -> None:
        self._loop = SimLoop()
        self._open: list[Envelope[Any]] = []
        self._pending: list[Timer] = []
        self._running: list[Job] = []
        self._ref = ActorRef(name, name, Channel(name, 1), InFlight())
        self._ref.incarnation = incarnation
        self._ref.make_context = partial(SteppedContext, self._loop)
        with self._inside():
            self.actor = factory(self._ref)
            self._ref.role = self.actor.ROLE
            self._ref.name = self.actor.ROLE if name == "stepped" else name
            self.actor.started()
            self.actor.context.state = State.RUNNING
        self.started = self._effects()

    # -- turns

    @property
    def now(self) -> float:
        """Seconds on the actor's clock."""
        return self._loop.time()

    def turn(self, message: Message, *, deadline: float | None = None) -> Effects:
        """One turn with a message. deadline: of an ask, in absolute seconds of the actor's clock.

        Raises the error of the turn, which would have ended the actor's incarnation, and TypeError
        for a message without a handler.
        """
        with self._inside():
            reply = self._loop.create_future() if isinstance(message, Ask) else None
            envelope: Envelope[Any] = Envelope(message, reply, deadline, self._ref.incarnation)
            if reply is not None:
                self._open.append(envelope)
            self.actor.mailbox.turn(envelope)
        return self._effects()

    def withdraw(self, message: Message) -> None:
        """The asker of an open ask gives up."""
        (reply,) = [one.reply for one in self._open if one.message is message]
        assert reply is not None
        reply.cancel()

    def finish(self, job: Job, value: Any = None) -> Effects:
        """A job returned a value: the turn with the message that becomes of it."""
        return self._end_job(job, job.done(value))

    def fail(self, job: Job, error: Exception) -> Effects:
        """A job raised: the turn with the message that becomes of it."""
        return self._end_job(job, job.failed(error))

    def elapse(self, seconds: float) -> Effects:
        """Advance the clock and take the turns of the timers that come due, in order. Returns their
        effects together."""
        until, total = self.now + seconds, Effects()
        while due := sorted(
            (t for t in self._pending if t.when <= until and not t.handle.cancelled()),
            key=lambda t: t.when,
        ):
            self._pending.remove(due[0])
            self._loop.jump(max(0.0, due[0].when - self.now))
            total = total.then(self.turn(due[0].message))
        self._loop.jump(max(0.0, until - self.now))
        return total

    # -- the end

    def close(self) -> None:
        """Dispose of jobs that were never run, and of the clock."""
        for job in self._running:
            job.coroutine.close()
        self._running.clear()
        for envelope in self._open:
            if envelope.reply is not None:
                envelope.reply.cancel()
        if not self._loop.is_closed():
            self._loop.close()

    def __del__(self) -> None:
        if hasattr(self, "_running"):
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inner parts

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Make the stepper's loop the running one inside the block, also inside a test that runs on
        a loop itself."""
        outer = _get_running_loop()
        _set_running_loop(self._loop)
        try:
            yield
        finally:
            _set_running_loop(outer)

    def _end_job(self, job: Job, message: Control) -> Effects:
        self._running.remove(job)
        job.coroutine.close()
        return self.turn(message)

    def _effects(self) -> Effects:
        own = [Told(self._ref.name, envelope.message) for envelope in self._ref.channel.purge()]
        answered = []
        for envelope in [one for one in self._open if one.abandoned]:
            self._open.remove(envelope)
            reply = envelope.reply
            if reply is not None and not reply.cancelled():
                error = reply.exception()
                answered.append(
                    Answered(envelope.message, None if error else reply.result(), error)
                )
        context: Any = self.actor.context
        found = Effects(
            (*context.told, *own),
            tuple(answered),
            tuple(context.started),
            tuple(context.set_timers),
        )
        self._running += context.started
        self._pending += context.set_timers
        context.told, context.started, context.set_timers = [], [], []
        return found
