"""Base types of the messages on a channel: tells, control messages and asks, and their
envelopes."""

from __future__ import annotations

import asyncio
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from kvactors.redact import redacted_repr, redacted_rich_repr

R = TypeVar("R")


class Message(msgspec.Struct, frozen=True, eq=False):
    """A tell through the bounded data lane. Its text has sizes in place of tokens and salts."""

    __repr__ = redacted_repr
    __rich_repr__ = redacted_rich_repr


class Control(Message, frozen=True, eq=False):
    """A completion or an order: it overtakes the data lane. Work in flight bounds their number."""


class Later(Control, frozen=True, eq=False):
    """The next step of an actor's own long work. It does not overtake the data lane: the actor
    takes one of each in turn."""


class Ask(Message, Generic[R], frozen=True, eq=False):
    """A message that is answered with an `R`."""


class Stop(Control, frozen=True, eq=False):
    """End after this turn. Sent by the supervisor once the system has drained."""


class PeerRestarted(Control, frozen=True, eq=False):
    """An actor restarted without its state: its operations in flight are never answered.
    incarnation: the new one. When this arrives none of its child jobs runs any more."""

    name: str
    incarnation: int


class InlineReply(msgspec.Struct, eq=False, gc=False):
    """The port of an ask's answer in its inline turn: as a future, at a third of its cost."""

    is_done: bool = False
    value: Any = None
    error: BaseException | None = None

    def done(self) -> bool:
        return self.is_done

    def set_result(self, value: Any) -> None:
        self.value, self.is_done = value, True

    def set_exception(self, error: BaseException) -> None:
        self.error, self.is_done = error, True

    def raise_error(self) -> NoReturn:
        """Raise the error, once. It is kept no longer: its frames refer to this object."""
        error, self.error = self.error, None
        try:
            raise error or RuntimeError("the error was raised before")
        finally:
            del error


class Envelope(msgspec.Struct, Generic[R], eq=False):
    """A message in flight, and for an ask the port of its answer.

    Attributes:
        reply: a future, or within an inline turn an `InlineReply`.
        deadline: absolute loop time after which the asker no longer waits, or None for a tell.
        incarnation: the receiver's incarnation that this is addressed to. A later one drops it.
    """

    message: Message
    reply: asyncio.Future[R] | None = None
    deadline: float | None = None
    incarnation: int = 0

    __repr__ = redacted_repr
    __rich_repr__ = redacted_rich_repr

    @property
    def abandoned(self) -> bool:
        return self.reply is not None and self.reply.done()
