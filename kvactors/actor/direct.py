"""Direct turns: while an actor waits for a message, an ask is handled in the step of its asker, and
not after two passes of the event loop.

A direct turn is the turn that the actor would take next anyway: no lane of its channel has an item,
so it overtakes no message. It runs in the actor's context variables, and an exception out of it
fails the actor and not the asker. The direct turns in one pass of the loop are bounded. After that
many an ask waits for the next pass, and other tasks run. If that has no direct turn left for it
either, it goes through the channel.

An ask that the actor answers in one step (`Actor.answerers`) needs no envelope.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from contextvars import copy_context
from types import CoroutineType, coroutine
from typing import TYPE_CHECKING, Any

from kvactors.actor.message import Envelope, Message

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
