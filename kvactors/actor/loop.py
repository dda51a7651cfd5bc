"""The turns of an actor: its mailbox loop, the time of all actors in a pass of the event loop, and
direct turns.

When a receiver's data lane is full, the actor takes no further turn until a place is free. This is
how back-pressure travels upstream along the acyclic forward channels.

Direct turns: while an actor waits for a message, an ask is handled in the step of its asker, and
not after two passes of the event loop. A direct turn is the turn that the actor would take next
anyway: no lane of its channel has an item, so it overtakes no message. It runs in the actor's
context variables, and an exception out of it fails the actor and not the asker. The direct turns in
one pass of the loop are bounded. After that many an ask waits for the next pass, and other tasks
run. If that has no direct turn left for it either, it goes through the channel.

An ask that the actor answers in one step (`Actor.answerers`) needs no envelope.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextvars import copy_context
from types import CoroutineType, coroutine
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from kvactors.actor.clock import now
from kvactors.actor.context import JobBroken, State
from kvactors.actor.instrument import InjectedFailure, Turn
from kvactors.actor.message import Envelope, Message, PeerRestarted, Stop
from kvactors.actor.uncancelled import uncancelled
from kvactors.errors import as_exception

if TYPE_CHECKING:
    from kvactors.actor.actor import Actor

TURNS = 192
"""Direct turns of one actor in a pass of the loop: about as many short ones as fit in TIME."""

TIME = 0.00075
"""Seconds from the first of them after which there are no more in this pass."""

LOOK = 4
"""Answers of one step after which the time is looked at: it takes as long as a tenth of one."""


class DirectTurns:
    """The direct turns of one incarnation. Made in the actor's task.

    Attributes:
        loop: that the actor runs on.
    """

    __slots__ = (
        "_answerers",
        "_broken",
        "_channel",
        "_chosen",
        "_clock",
        "_end",
        "_handle",
        "_in_flight",
        "_instruments",
        "_left",
        "_mailbox",
        "_outbox",
        "_ref",
        "_run",
        "_sharing",
        "_until",
        "_waiting",
        "loop",
    )

    def __init__(self, actor: Actor) -> None:
        self._ref, self._channel, self._outbox = actor.ref, actor.ref.channel, actor.context.outbox
        self._in_flight, self._instruments = actor.ref.in_flight, actor.ref.instruments
        self._mailbox, self._handle = actor.mailbox, actor.mailbox.handle
        self._answerers = actor.answerers
        self.loop = asyncio.get_running_loop()
        self._chosen = choice_of(self.loop)
        # A loop of virtual time has its own clock. Others read this one, through another call.
        self._clock = time.monotonic if self._chosen is None else self.loop.time
        self._run: Callable[..., None] = copy_context().run
        # Of this pass, or of the ask that has waited for it. -1: the pass had no direct turn.
        self._left, self._until = -1, 0.0
        self._end = 0.0  # for asks that have waited
        self._waiting = 0  # asks that wait for a pass
        self._sharing = 1  # those that have waited for this one
        self._broken: BaseException | None = None

    def answer(self, message: Message) -> Any:
        """Take a turn that answers an ask by the actor's `answerers`.

        An answerer sends no message and starts no job, so it has the context variables of the
        asker. None: the ask has to be sent, and nothing has happened. An answerer returns it, and
        has changed nothing, for an ask that needs its handler.
        """
        channel, left = self._channel, self._left
        if not channel.idle or self._instruments.active:
            return None
        answerer = self._answerers.get(type(message))
        if answerer is None or (self._chosen is not None and not self._chosen()):
            return None
        if left < 0:
            self._begin_pass()
            left = TURNS
        elif not left % LOOK:
            clock = self._clock  # a call of an attribute that is no method takes longer
            if not left or clock() > self._until:
                self._left = 0
                return None
        ref = self._ref
        ref.direct = None  # as in `take`
        try:
            found = answerer(message)
        except BaseException as error:
            self._break(error)
            return None  # the ask goes through the channel, and fails with the actor
        ref.direct = self
        if found is not None:
            self._left = left - 1
            channel.answered += 1
        return found

    @property
    def is_spent(self) -> bool:
        """Whether it is only in a later pass of the loop that an ask can be a direct turn."""
        if self._left < 0 or self._instruments.active or not self._channel.idle:
            return False
        return not self._left or self._clock() > self._until

    async def ask_later(self, message: Message, begin: Callable[[], Any]) -> Any:
        """An ask in the next pass of the loop, which costs less than the channel. begin: sends it,
        if the turns of that pass are spent as well."""
        if (answer := await self.answer_later(message)) is not None:
            return answer
        asked = begin()
        return await asked if isinstance(asked, CoroutineType) else asked

    @coroutine
    def answer_later(self, message: Message) -> Generator[None, None, Any]:
        """`answer` in the next pass of the loop: its other tasks run first. Asks that wait share
        the direct turns of that pass, so that none of them is behind another one for long."""
        self._waiting += 1
        self._in_flight.begin()  # as in the channel
        try:
            yield  # as `asyncio.sleep(0)`, without its coroutine
        finally:
            self._waiting -= 1
            self._in_flight.end()
        if self._left < 0:
            self._begin_pass()
        now, share = self._clock(), self._sharing
        if now < self._end:
            self._left, self._until = max(1, TURNS // share), now + TIME / share
        return self.answer(message) if self._ref.direct is self else None

    def take(self, envelope: Envelope[Any]) -> bool:
        """Take a turn with an ask. False, and nothing happens, if it has to go through the
        channel."""
        if self._chosen is not None and not self._chosen():
            return False
        if not self._channel.idle:
            return False
        if self._left < 0:
            self._begin_pass()
        elif not self._left or self._clock() > self._until:
            return False
        self._left -= 1
        self._channel.taken += 1
        self._in_flight.begun += 1  # and ended, before anything else can look
        ref = self._ref
        ref.direct = None  # an ask out of this turn, of a finaliser for example, is not nested
        try:
            if self._instruments.active:
                self._instruments.notify("sent", ref, envelope, self._instruments.turn)
                self._run(self._mailbox.observed_turn, envelope)
            else:
                self._run(self._handle, envelope)
        except BaseException as error:
            self._break(error)
            return True
        ref.direct = self
        if self._outbox.waiting:
            self._channel.wake()  # the actor's task sends them when their receivers have places
        return True

    def _break(self, error: BaseException) -> None:
        """The actor has failed in a direct turn: its task ends with the error."""
        self._broken = error
        self._in_flight.begin()
        self._channel.wake()
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error

    def pop_broken(self) -> BaseException | None:
        """The exception of a direct turn, for the actor's task, which handles no message after
        it."""
        error, self._broken = self._broken, None
        if error is not None:
            self._in_flight.end()
        return error

    def _begin_pass(self) -> None:
        """The first direct turn in a pass of the loop."""
        self._left, self._until = TURNS, self._clock() + TIME
        self._end = self._until + TIME / 2
        self.loop.call_soon(self._renew)

    def _renew(self) -> None:
        self._left, self._sharing = -1, max(1, self._waiting)


def choice_of(loop: asyncio.AbstractEventLoop) -> Callable[[], bool] | None:
    """Which asks a loop lets be direct turns: a loop of virtual time draws it from its seed. None:
    all."""
    return getattr(loop, "takes_directly", None)


def are_possible(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop has direct turns at all."""
    return getattr(loop, "direct", 1.0) > 0.0


# -- the time of a pass. A pass of the event loop runs every callback that is ready. Under load each
# of several actors has messages, and their turns together would delay the loop's other callbacks,
# although each actor yields soon.

PASS_TIME = 0.0001
"""Seconds from the first turn of a pass. An actor with a message steps aside after that."""

ASIDE = 2
"""Passes for which it steps aside. In the next one, callbacks of timers run behind those that were
ready before: an actor among these would delay them once more."""


class PassTime:
    """The turns of all actors of an event loop in the present pass. It does not refer to the loop,
    which would stay in memory for it."""

    __slots__ = ("_begun", "_until")

    def __init__(self) -> None:
        self._begun, self._until = False, 0.0

    def is_over(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the time of this pass of the loop is over. Asked before each turn of an actor."""
        now = loop.time()
        if self._begun:
            return now > self._until
        self._begun, self._until = True, now + PASS_TIME
        loop.call_soon(self._end)
        return False

    def _end(self) -> None:
        self._begun = False


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, PassTime] = WeakKeyDictionary()


def pass_time_of(loop: asyncio.AbstractEventLoop) -> PassTime | None:
    """The actors of several caches on one loop share its passes. None on a loop of virtual time,
    where a pass takes no time."""
    if choice_of(loop) is not None:
        return None
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = PassTime()
    return found


# -- the mailbox

TURN_BUDGET = 64
"""Turns before an actor lets others run: a receive that finds a message does not yield by
itself."""


class MailboxLoop:
    """Runs one incarnation of an actor.

    Attributes:
        skipped: asks given up before their turn, and messages for an earlier incarnation.
        ended_at: when the failure or the stop came, on the loop's clock.
        failed_peer: the failure of another actor, if it is the reason why this one is cancelled.
    """

    def __init__(self, actor: Actor) -> None:
        self.skipped = 0
        self._handled, self._answered_before = 0, actor.ref.channel.answered
        self._answered_until: int | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended_at: float | None = None
        self.failed_peer: Callable[[], tuple[str, BaseException] | None] = lambda: None
        self._actor = actor
        self._context = actor.context
        self._ref = actor.ref
        self._handlers = actor.handlers

    @property
    def turns(self) -> int:
        """Turns taken so far."""
        until = self._answered_until
        answered = self._ref.channel.answered if until is None else until
        return self._handled + answered - self._answered_before

    async def run(self) -> None:
        """Take turns until the actor is stopped.

        An exception out of a turn ends the incarnation: every ask that it has taken in fails, then
        the exception is raised.
        """
        cause: BaseException | None = None
        context = self._context
        try:
            try:
                self._start()
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                _fail(error)
            self._ref.end_restart()
            context.state = State.RUNNING
            await self._take_turns()
            context.state = State.STOPPING
        except BaseException as error:
            cause = error
            raise
        finally:
            await self._end(cause)

    def _start(self) -> None:
        instruments = self._ref.instruments
        if not instruments.active:
            self._actor.started()
            return
        instruments.notify("started", self._actor)
        instruments.turn = Turn(self._ref, None)
        try:
            self._actor.started()
        finally:
            instruments.turn = None

    async def _take_turns(self) -> None:
        channel, budget, loop = self._ref.channel, TURN_BUDGET, asyncio.get_running_loop()
        in_flight, context, outbox = self._ref.in_flight, self._context, self._context.outbox
        instruments, ref = self._ref.instruments, self._ref
        direct = DirectTurns(self._actor) if are_possible(loop) else None
        passes, aside = pass_time_of(loop), False
        while context.state is State.RUNNING:
            if outbox.waiting:
                await outbox.flush()
            envelope = channel.get_nowait()
            if envelope is None:
                ref.direct = direct
                try:
                    await channel.wait_for_item()
                finally:
                    ref.direct = None
                    if direct is not None and (broken := direct.pop_broken()) is not None:
                        _fail(broken)
                budget, aside = TURN_BUDGET, False
                continue
            # An actor that has stepped aside takes a turn in any case.
            if budget == 0 or (not aside and passes is not None and passes.is_over(loop)):
                aside = budget != 0
                await self._step_aside(envelope, ASIDE if aside else 1)
                budget = TURN_BUDGET
            else:
                aside = False
            budget -= 1
            try:
                if instruments.active:
                    self.observed_turn(envelope)
                else:
                    self.turn(envelope)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                _fail(error)
            finally:
                in_flight.end()

    async def _step_aside(self, envelope: Envelope[Any], passes: int) -> None:
        """Let others run for so many passes of the loop, before the turn of a message that has been
        taken."""
        try:
            for _ in range(passes):
                await asyncio.sleep(0)
        except BaseException:
            self._ref.in_flight.end()
            self._ref.fail_with_actor(envelope, self._ref.name, None)
            raise

    def turn(self, envelope: Envelope[Any]) -> None:
        """One turn, unless the message is for an earlier incarnation or its asker has gone."""
        if envelope.incarnation != self._context.incarnation or envelope.abandoned:
            self.skipped += 1
            self._ref.fail_with_actor(envelope, self._ref.name, None)
        else:
            self.handle(envelope)

    def handle(self, envelope: Envelope[Any]) -> None:
        """Give a message to its handler."""
        message, context = envelope.message, self._context
        kind = type(message)
        self._handled += 1
        handler = self._handlers.get(kind)
        if envelope.reply is not None and handler is not None:
            context.unanswered[envelope] = None
            handler(message, envelope)
            return
        if isinstance(message, PeerRestarted) and message.incarnation >= 0:
            context.peer_incarnations[message.name] = message.incarnation
        if handler is not None:
            handler(message)
        elif isinstance(message, JobBroken):
            raise message.error
        elif kind is Stop:
            context.state = State.STOPPING
        elif kind is not PeerRestarted:
            raise TypeError(f"{self._ref.name} has no handler for {kind.__name__}")

    def observed_turn(self, envelope: Envelope[Any]) -> None:
        """`turn` with the instruments' part."""
        instruments = self._ref.instruments
        instruments.turn = Turn(self._ref, envelope)
        try:
            try:
                instruments.notify("taken", self._ref, envelope)
            except InjectedFailure:
                if envelope.reply is not None:
                    self._context.unanswered[envelope] = None
                raise
            self.turn(envelope)
            instruments.notify("finished", self._ref, envelope)
        finally:
            instruments.turn = None

    async def _end(self, cause: BaseException | None) -> None:
        """Leave nothing behind: fail open asks, drop unsent messages and timers, end the jobs."""
        context = self._context
        self.ended_at, self._answered_until = now(), self._ref.channel.answered
        if context.state < State.STOPPING:
            context.state = State.STOPPING
        if isinstance(cause, Exception):
            self._ref.begin_restart()
            self._ref.instruments.notify("failed", self._ref, cause)
        name, peer = self._ref.name, self.failed_peer()
        if peer is not None and isinstance(cause, asyncio.CancelledError):
            name, cause = peer
        for envelope in context.unanswered:
            self._ref.fail_with_actor(envelope, name, cause)
        context.unanswered.clear()
        context.outbox.clear()
        for timer in list(context.timers):
            timer.cancel()
        try:
            await uncancelled(self._end_jobs(cause))
        finally:
            context.state = State.STOPPED
            self._ref.instruments.notify("stopped", self._actor)
            if not self.ended.done():
                self.ended.set_result(None)

    async def _end_jobs(self, cause: BaseException | None) -> None:
        actor, jobs = self._actor, self._context.jobs
        failed = isinstance(cause, Exception)
        try:
            limit = actor.job_limit(failed=failed)
            await jobs.end(limit)
            if jobs.running:
                actor.log.error("jobs do not end", jobs=len(jobs.running), seconds=limit)
                restart = failed or self.failed_peer() is not None
                actor.left_behind(jobs.abandon(), restart=restart)
        finally:
            await actor.stopped()


def _fail(error: BaseException) -> None:
    """Raise an error of a synchronous step. No cancellation can arrive in one: any error but Ctrl-C
    and an exit is a failure of this actor."""
    failure = as_exception(error)
    if failure is error:
        raise failure
    raise failure from error
