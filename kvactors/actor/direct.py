"""Direct turns: while an actor waits for a message, an ask is handled in the step of its asker, and
not after two passes of the event loop.

A direct turn is the turn that the actor would take next anyway: no lane of its channel has an item,
so it overtakes no message. It runs in the actor's context variables, and an exception out of it
fails the actor and not the asker. The direct turns in one pass of the loop are bounded. After that
many an ask goes through the channel, and other tasks run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from kvactors.actor.message import Envelope

if TYPE_CHECKING:
    from kvactors.actor.actor import Actor

TURNS = 128
"""Direct turns of one actor in a pass of the loop: about as many short ones as fit in TIME."""

TIME = 0.0005
"""Seconds from the first of them after which there are no more in this pass."""


class DirectTurns:
    """The direct turns of one incarnation. Made in the actor's task.

    Attributes:
        loop: that the actor runs on.
    """

    __slots__ = (
        "_broken",
        "_channel",
        "_chosen",
        "_clock",
        "_handle",
        "_in_flight",
        "_instruments",
        "_left",
        "_mailbox",
        "_outbox",
        "_ref",
        "_run",
        "_until",
        "loop",
    )

    def __init__(self, actor: Actor) -> None:
        self._ref, self._channel, self._outbox = actor.ref, actor.ref.channel, actor.context.outbox
        self._in_flight, self._instruments = actor.ref.in_flight, actor.ref.instruments
        self._mailbox, self._handle = actor.mailbox, actor.mailbox.handle
        self.loop = asyncio.get_running_loop()
        self._chosen = choice_of(self.loop)
        # A loop of virtual time has its own clock. Others read this one, through another call.
        self._clock = time.monotonic if self._chosen is None else self.loop.time
        self._run: Callable[..., None] = copy_context().run
        self._left, self._until = TURNS, 0.0
        self._broken: BaseException | None = None

    def take(self, envelope: Envelope[Any]) -> bool:
        """Take a turn with an ask. False, and nothing happens, if it has to go through the
        channel."""
        left = self._left
        if self._chosen is not None and not self._chosen():
            return False
        if not self._channel.idle:
            return False
        if left == TURNS:
            self._until = self._clock() + TIME
            self.loop.call_soon(self._renew)
        elif not left or self._clock() > self._until:
            return False
        self._left = left - 1
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
            self._broken = error
            self._in_flight.begin()
            self._channel.wake()
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            return True
        ref.direct = self
        if self._outbox.waiting:
            self._channel.wake()  # the actor's task sends them when their receivers have places
        return True

    def pop_broken(self) -> BaseException | None:
        """The exception of a direct turn, for the actor's task, which handles no message after
        it."""
        error, self._broken = self._broken, None
        if error is not None:
            self._in_flight.end()
        return error

    def _renew(self) -> None:
        self._left = TURNS


def choice_of(loop: asyncio.AbstractEventLoop) -> Callable[[], bool] | None:
    """Which asks a loop lets be direct turns: a loop of virtual time draws it from its seed. None:
    all."""
    return getattr(loop, "takes_directly", None)


def are_possible(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop has direct turns at all."""
    return getattr(loop, "direct", 1.0) > 0.0
