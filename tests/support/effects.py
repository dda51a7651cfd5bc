"""The effects of turns as lists, for objects that are tested without their actor."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvactors.actor import ActorRef, Channel, Control, Envelope, InFlight, Message
from kvactors.actor.effects import Effects


def receiver(role: str) -> ActorRef[Any]:
    """A receiver that no message reaches."""
    return ActorRef(role, role, Channel(role, 1), InFlight())


class Reply(NamedTuple):
    """A request was answered with a value."""

    envelope: Envelope[Any]
    value: Any


class Refusal(NamedTuple):
    """A request was answered with an error."""

    envelope: Envelope[Any]
    error: Exception


class Started:
    """A timer was started, to send `message` after `delay` seconds."""

    def __init__(self, delay: float, message: Control) -> None:
        self.delay = delay
        self.message = message
        self.cancelled = False

    def cancel(self) -> None:
        """The message is no longer needed."""
        self.cancelled = True


class RecordedEffects(Effects):
    """Keeps each effect: messages, `Reply`, `Refusal` and `Started`, in order."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done: list[Any] = []
        bound: Any = self  # there is no context, whose methods these would be
        bound.send = lambda _, message: self.done.append(message)
        bound.to_self = self.done.append
        bound.reply = lambda *reply: self._add(Reply(*reply))
        bound.refuse = lambda *refusal: self._add(Refusal(*refusal))
        bound.after = lambda *timer: self._add(Started(*timer))

    def _add(self, effect: Any) -> Any:
        self.done.append(effect)
        return effect if isinstance(effect, Started) else True

    def take(self) -> list[Any]:
        """What was done since the last call."""
        taken, self.done[:] = list(self.done), []
        return taken

    def answers(self) -> list[Any]:
        """`take`, only the values and errors of answers."""
        return [
            done.value if isinstance(done, Reply) else done.error
            for done in self.take()
            if isinstance(done, (Reply, Refusal))
        ]

    def messages(self) -> list[Message]:
        """`take`, only the messages."""
        return [done for done in self.take() if isinstance(done, Message)]
