"""The turns of an actor: its mailbox, the time of all actors in a pass of the event loop, and
inline turns.

When a receiver's data lane is full, the actor takes no further turn until a place is free. This is
how back-pressure travels upstream along the acyclic forward channels.

Inline turns: while an actor waits for a message, an ask is handled in the step of its asker, and
not after two passes of the event loop. An inline turn is the turn that the actor would take next
anyway: no lane of its channel has an item, so it overtakes no message. It runs in the actor's
context variables, and an exception out of it fails the actor and not the asker. The inline turns in
one pass of the loop are bounded. Asks beyond that wait in a queue, and other tasks run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import copy_context
from itertools import islice
from types import CoroutineType
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

from kvactors.actor.clock import now
from kvactors.actor.context import JobBroken, State
from kvactors.actor.instrument import InjectedFailure, Turn
from kvactors.actor.message import Ask, Envelope, InlineReply, PeerRestarted, Stop
from kvactors.actor.uncancelled import uncancelled
from kvactors.errors import as_exception

if TYPE_CHECKING:
    from kvactors.actor.actor import Actor
    from kvactors.actor.ref import ActorRef, Lost

R = TypeVar("R")

INLINE_TURNS = 192
"""Inline turns of one actor in a pass of the loop: about as many short ones as fit in
INLINE_TIME_S."""

INLINE_TIME_S = 0.00075
"""Seconds of a pass that inline turns may take, from the first inline turn on."""

SHARE_TURNS = 12
"""Inline turns of an ask that has waited, and of its task's next asks, at least: the wake-up of a
task costs as much as two turns, and its prompt is in the processor's cache only now."""

BUSY_ASKS = 8
"""Messages in the channel of a busy actor up to which an ask is put behind them. Many asks there
would keep the actor from being idle for good."""

BUSY_PASSES = 8
"""Passes in a row in which the actor is busy, after which asks that wait go through the channel."""

PASS_TIME_S = 0.0001
"""Seconds from the first turn of a pass. An actor with a message steps aside after that."""

PASSES_ASIDE = 2
"""Passes of the loop that an actor skips when it steps aside. In the next pass timers run behind
the callbacks that were ready before: an actor among these would delay the timers again."""

TURN_BUDGET = 64
"""Turns before an actor lets others run: a receive that finds a message does not yield by
itself."""


class InlineTurns:
    """The inline turns of one incarnation. Made in the actor's task."""

    def __init__(self, actor: Actor) -> None:
        self._ref: ActorRef[Any] = actor.ref
        self._channel = actor.ref.channel
        self._in_flight, self._instruments = actor.ref.in_flight, actor.ref.instruments
        self._mailbox, self._handlers = actor.mailbox, actor.handlers
        self._unanswered = actor.context.unanswered
        self._loop = asyncio.get_running_loop()
        self._chosen = choice_of(self._loop)
        # A loop of virtual time has its own clock. uvloop's stands still within a pass.
        self._clock = time.monotonic if self._chosen is None else self._loop.time
        self._run: Callable[..., None] = copy_context().run
        # Turns left in this pass, or for the task whose ask has waited. -1: there was none yet.
        self._left, self._until = -1, 0.0
        self._ends = False  # whether the end of the pass is a callback of the loop already
        self._extended = 0.0  # the end of the time of asks that have waited
        self._waiting: dict[object, asyncio.Future[None]] = {}  # in order of their asking
        self._share = 1  # of how many asks that have waited the turns of this pass are
        self._none_yet = True  # of them has gone on
        self._busy_passes = 0
        self._error: BaseException | None = None

    def begin_ask(
        self, message: Ask[R], deadline: float, lost: Lost[R] = None, *, queued: bool = False
    ) -> R | CoroutineType[Any, Any, R]:
        """`ActorRef.begin_ask` by an inline turn, now or in a later pass."""
        left, ref = self._left, self._ref
        if not self._channel.idle or (self._chosen is not None and not self._chosen()):
            return self._begin_later(message, deadline, lost, queued=queued)
        if left < 0:
            self._begin_pass()
            left = INLINE_TURNS
        else:
            clock = self._clock  # local variable: faster than a call of the attribute
            if not left or clock() > self._until:
                self._left = 0
                return self._begin_later(message, deadline, lost, queued=queued)
        self._left = left - 1
        reply: Any = InlineReply()  # what is used of a future
        handler = self._handlers.get(type(message))
        envelope: Envelope[Any] = Envelope(message, reply, deadline, ref.incarnation)
        ref.entrance = ref  # an ask out of this turn, of a finaliser for example, is not nested
        try:
            if self._instruments.active or handler is None:
                self._take_observed(envelope)
            else:
                self._mailbox.turns += 1
                self._run(handler, message, envelope)
        except BaseException as error:
            self._fail(error)
        else:
            ref.entrance = self
        if reply.is_done:
            if reply.error is not None:
                reply.raise_error()
            answer: R = reply.value
            return answer
        if envelope.reply is reply:
            self._unanswered[envelope] = None
            envelope.reply = self._loop.create_future()
        return ref.wait_answer(envelope, lost, taken=True)

    def _take_observed(self, envelope: Envelope[Any]) -> None:
        envelope.reply = self._loop.create_future()  # instruments may add a callback
        self._instruments.notify("sent", self._ref, envelope, self._instruments.turn)
        self._run(self._mailbox.observed_turn, envelope)

    def _begin_later(
        self, message: Ask[R], deadline: float, lost: Lost[R], *, queued: bool
    ) -> CoroutineType[Any, Any, R]:
        """Begin an ask that has no turn now: the actor is busy, or the pass has none any more."""
        idle, few = self._channel.idle, self._channel.backlog < BUSY_ASKS
        if queued or (idle and self._left) or (not idle and few and not self._waiting):
            begun: Any = self._ref.begin_ask(message, deadline, lost)
        else:
            begun = self._ask_later(message, deadline, lost)
        return cast("CoroutineType[Any, Any, R]", begun)

    async def _ask_later(self, message: Ask[R], deadline: float, lost: Lost[R]) -> R:
        """An ask for which this pass of the loop has no turn any more."""
        await self._wait()
        asked = self._ref.entrance.begin_ask(message, deadline, lost, queued=True)
        return await asked if isinstance(asked, CoroutineType) else asked

    async def _wait(self) -> None:
        """Wait for a pass that has turns for an ask. Asks wait in order, and each has at most a
        share of a pass, so that none of them is behind another one for long."""
        waiting, clock, channel, key = self._waiting, self._clock, self._channel, object()
        self._in_flight.begin()  # as in the channel
        try:
            while True:
                waiting[key] = turn = self._loop.create_future()
                self._end_later()
                await turn
                if self._left < 0:
                    self._begin_pass()
                # Slow turns may have taken the time of the pass: the first ask goes on in any case.
                at, busy = clock(), not channel.idle
                if (
                    self._busy_passes > BUSY_PASSES
                    if busy
                    else self._none_yet or at < self._extended
                ):
                    self._none_yet = False
                    self._left = max(1, INLINE_TURNS // self._share)
                    self._until = at + INLINE_TIME_S / self._share
                    return
        finally:
            del waiting[key]
            self._in_flight.end()

    def _begin_pass(self) -> None:
        """The first inline turn in a pass of the loop."""
        self._left, self._until = INLINE_TURNS, self._clock() + INLINE_TIME_S
        self._extended = self._until + INLINE_TIME_S / 2
        self._end_later()

    def _end_later(self) -> None:
        if not self._ends:
            self._ends = True
            self._loop.call_soon(self._end_pass)

    def _end_pass(self) -> None:
        """Wake the asks that have waited longest, as many as share the turns of the next pass."""
        self._left, self._ends, waiting = -1, False, self._waiting
        if waiting:
            first = list(islice(waiting.values(), max(1, INLINE_TURNS // SHARE_TURNS)))
            self._share, self._none_yet = len(first), True
            over = self._channel.idle or self._busy_passes > BUSY_PASSES
            self._busy_passes = 0 if over else self._busy_passes + 1
            for turn in first:
                if not turn.done():
                    turn.set_result(None)
            self._end_later()

    def _fail(self, error: BaseException) -> None:
        """The actor has failed in an inline turn: its task ends with the error."""
        self._error = error
        self._in_flight.begin()
        self._channel.wake()
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error

    def pop_error(self) -> BaseException | None:
        """The exception of an inline turn, after which the actor's task handles no message."""
        error, self._error = self._error, None
        if error is not None:
            self._in_flight.end()
        return error


def choice_of(loop: asyncio.AbstractEventLoop) -> Callable[[], bool] | None:
    """Draws which asks are inline turns on a loop of virtual time. None on any other: all are."""
    return getattr(loop, "takes_directly", None)


def are_possible(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop has inline turns at all."""
    return getattr(loop, "direct", 1.0) > 0.0


# -- the time of a pass. A pass of the event loop runs every callback that is ready. Under load each
# of several actors has messages, and their turns together would delay the loop's other callbacks,
# although each actor yields soon.


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
        self._begun, self._until = True, now + PASS_TIME_S
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


class Budget:
    """The turns that an actor takes before it lets other tasks of the loop run: at most
    TURN_BUDGET, and those for which the pass has time."""

    __slots__ = ("_aside", "_left", "_loop", "_pass_time")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._pass_time = loop, pass_time_of(loop)
        self.renew()

    def renew(self) -> None:
        self._left, self._aside = TURN_BUDGET, False

    def spent(self) -> int:
        """Count the next turn. Returns the passes for which the actor steps aside before it."""
        if self._left == 0:
            passes, self._aside = 1, False
        elif self._aside or self._pass_time is None or not self._pass_time.is_over(self._loop):
            self._aside = False  # an actor that has stepped aside takes a turn in any case
            self._left -= 1
            return 0
        else:
            passes, self._aside = PASSES_ASIDE, True
        self._left = TURN_BUDGET - 1
        return passes


# -- the mailbox


class MailboxLoop:
    """Runs one incarnation of an actor.

    Attributes:
        skipped: asks given up before their turn, and messages for an earlier incarnation.
        ended_at: when the failure or the stop came, on the loop's clock.
        failed_peer: the failure of another actor, if it is the reason why this one is cancelled.
    """

    def __init__(self, actor: Actor) -> None:
        self.turns = self.skipped = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended_at: float | None = None
        self.failed_peer: Callable[[], tuple[str, BaseException] | None] = lambda: None
        self._actor = actor
        self._context = actor.context
        self._ref = actor.ref
        self._handlers = actor.handlers

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
        instruments.notify("started", self._actor)
        instruments.turn = Turn(self._ref, None)
        try:
            self._actor.started()
        finally:
            instruments.turn = None

    async def _take_turns(self) -> None:
        ref, context, loop = self._ref, self._context, asyncio.get_running_loop()
        channel, outbox, in_flight = ref.channel, context.outbox, ref.in_flight
        inline = InlineTurns(self._actor) if are_possible(loop) else None
        budget = Budget(loop)
        ref.entrance = inline or ref
        while context.state is State.RUNNING:
            if outbox.waiting:
                await outbox.flush()
            envelope = channel.get_nowait()
            if envelope is None:
                try:
                    await channel.wait_for_item()
                finally:
                    if inline is not None and (error := inline.pop_error()) is not None:
                        _fail(error)
                budget.renew()
                continue
            if passes := budget.spent():
                await self._step_aside(envelope, passes)
            try:
                if ref.instruments.active:
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
        """Let other tasks run for `passes` passes of the loop, before the turn of a message
        that has been taken."""
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
        message, context = envelope.message, self._context
        kind = type(message)
        self.turns += 1
        handler = self._handlers.get(kind)
        if envelope.reply is not None and handler is not None:
            context.unanswered[envelope] = None
            handler(message, envelope)
            return
        if isinstance(message, PeerRestarted):
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
        context, self._ref.entrance = self._context, self._ref
        self.ended_at = now()
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
