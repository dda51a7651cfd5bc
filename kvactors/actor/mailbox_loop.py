"""The loop of an actor: takes messages from its channel and gives each to its handler, one turn a
message.

When a receiver's data lane is full, the actor takes no further turn until a place is free. This is
how back-pressure travels upstream along the acyclic forward channels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvactors.actor.clock import now
from kvactors.actor.context import State
from kvactors.actor.direct import DirectTurns, are_possible
from kvactors.actor.instrument import InjectedFailure, Turn
from kvactors.actor.jobs import JobBroken
from kvactors.actor.message import Envelope, PeerRestarted, Stop
from kvactors.actor.passes import ASIDE, pass_time_of
from kvactors.actor.uncancelled import uncancelled
from kvactors.errors import as_exception

if TYPE_CHECKING:
    from kvactors.actor.actor import Actor

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
