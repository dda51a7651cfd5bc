"""The effects of turns as lists, for objects that are tested without their actor."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvactors.actor import ActorRef, Channel, Control, Envelope, InFlight, Message
from kvactors.actor.context import Effects


def receiver(name: str, role: str | None = None) -> ActorRef[Any]:
    """A receiver that no message reaches. role: None if it is the name."""
    return ActorRef(name, role or name, Channel(name, 1), InFlight())


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


class Recording:
    """Keeps each effect: messages, `Reply`, `Refusal` and `Started`, in order. To be mixed into a
    class of effects."""

    __slots__ = ()

    def __init__(self) -> None:
        bound: Any = self  # there is no context, whose methods these would be
        bound.done = []
        bound.send = lambda _, message: bound.done.append(message)
        bound.to_self = bound.done.append
        bound.reply = lambda *reply: self._add(Reply(*reply))
        bound.refuse = lambda *refusal: self._add(Refusal(*refusal))
        bound.after = lambda *timer: self._add(Started(*timer))

    def _add(self, effect: Any) -> Any:
        bound: Any = self
        bound.done.append(effect)
        if isinstance(effect, (Reply, Refusal)):
            return not effect.envelope.abandoned
        return effect

    def take(self) -> list[Any]:
        """The effects since the last call."""
        bound: Any = self
        taken, bound.done[:] = list(bound.done), []
        return taken


class RecordedEffects(Recording, Effects):
    """The effects of any actor."""


def answers(effects: list[Any]) -> list[Any]:
    """The values and errors that requests are answered with, in order."""
    return [
        effect.value if isinstance(effect, Reply) else effect.error
        for effect in effects
        if isinstance(effect, (Reply, Refusal))
    ]


def messages(effects: list[Any]) -> list[Message]:
    """The messages among effects, in order."""
    return [effect for effect in effects if isinstance(effect, Message)]
