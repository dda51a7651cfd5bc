"""The results of a turn of PrefixIndex: messages to send, requests to answer, timers to start.

The objects of this package decide and return actions. They never send: only the actor does.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

from msgspec import Struct

from kvactors.actor import Control, Envelope, Message, Timer


class Timed:
    """An operation with a deadline.

    Attributes:
        timer: set by the actor.
        over: the operation has ended, so no timer is started any more.
    """

    __slots__ = ("over", "timer")

    def __init__(self) -> None:
        self.timer: Timer | None = None
        self.over = False

    def stop_timer(self) -> None:
        """The operation has ended: its timer must not fire."""
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Reply(Struct):
    """Answer a request with a value."""

    envelope: Envelope[Any]
    value: Any


class Refusal(Struct):
    """Answer a request with an error."""

    envelope: Envelope[Any]
    error: Exception


class StartTimer(Struct):
    """Send `message` to the actor itself `grace` seconds after `deadline`, unless `operation` has
    ended by then.

    Attributes:
        deadline: absolute loop time, now if it has passed.
    """

    operation: Timed
    deadline: float
    message: Control
    grace: float = 0.0


Action: TypeAlias = Reply | Refusal | StartTimer | Message
"""A `Message` is sent to the actor that receives its type."""

Work: TypeAlias = Generator[list[Action], None, list[Action]]
"""Work in parts of one turn each: yields the actions of each part, returns those of the last."""
