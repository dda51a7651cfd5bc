"""Direct turns: while an actor waits for a message, an ask is handled in the step of its asker, and
not after two passes of the event loop.

A direct turn is the turn that the actor would take next anyway: no lane of its channel has an item,
so it overtakes no message. It runs in the actor's context variables, and an exception out of it
fails the actor and not the asker. The direct turns in one pass of the loop are bounded. After that
many an ask goes through the channel, and other tasks run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from kvactors.actor.jobs import JobBroken
from kvactors.actor.message import Envelope
from kvactors.errors import as_exception

if TYPE_CHECKING:
    from kvactors.actor.actor import Actor

TURNS = 64
"""Direct turns of one actor in a pass of the event loop."""

TIME = 0.0005
"""Seconds from the first of them after which there are no more in this pass."""


class TurnBroken(JobBroken, frozen=True, eq=False):
    """A direct turn has raised: the actor fails."""


class DirectTurns:
    """The direct turns of one incarnation. Made in the actor's task."""

    __slots__ = (
        "_channel",
        "_in_flight",
        "_instruments",
        "_left",
        "_loop",
        "_mailbox",
        "_outbox",
        "_ref",
        "_run",
        "_turn",
        "_until",
    )

    def __init__(self, actor: Actor) -> None:
        self._ref, self._channel, self._outbox = actor.ref, actor.ref.channel, actor.context.outbox
        self._in_flight, self._instruments = actor.ref.in_flight, actor.ref.instruments
        self._mailbox, self._turn = actor.mailbox, actor.mailbox.turn
        self._loop = asyncio.get_running_loop()
        self._run: Callable[..., None] = copy_context().run
        self._left, self._until = TURNS, 0.0

    def take(self, envelope: Envelope[Any]) -> bool:
        """Take a turn with an ask. False, and nothing happens, if it has to go through the
        channel."""
        left = self._left
        if left == TURNS:
            if not self._channel.pass_directly():
                return False
            self._until = self._loop.time() + TIME
            self._loop.call_soon(self._renew)
        elif not left or self._loop.time() > self._until or not self._channel.pass_directly():
            return False
        self._left = left - 1
        self._in_flight.begun += 1  # and ended, before anything else can look
        try:
            if self._instruments.active:
                self._instruments.notify("sent", self._ref, envelope, self._instruments.turn)
                self._run(self._mailbox.observed_turn, envelope)
            else:
                self._run(self._turn, envelope)
        except BaseException as error:
            broken = TurnBroken(as_exception(error))
            self._ref.try_send(Envelope(broken, None, None, envelope.incarnation))
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
        if self._outbox.waiting:
            self._channel.wake()  # the actor's task sends them when their receivers have places
        return True

    def _renew(self) -> None:
        self._left = TURNS


def are_possible(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether direct turns suit a loop. One of virtual time draws the order of its steps from a
    seed, and needs a step for each message."""
    return not getattr(loop, "step_per_message", False)
