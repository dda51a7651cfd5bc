"""Actions: returned by the pure objects of the host tier, carried out by the actor in order."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from kvactors.actor import ActorRef, Control
from kvactors.actor.message import Message

M = TypeVar("M", bound=Message, covariant=True)
R = TypeVar("R", bound=Message)


class Send(msgspec.Struct, Generic[M], frozen=True, eq=False):
    """Send a message to another actor."""

    to: ActorRef
    message: M


def send(to: ActorRef[R], message: R) -> Send[Any]:
    """A `Send`, whose message mypy checks against the receiver's messages."""
    return Send(to, message)


class StartTimer(msgspec.Struct, frozen=True, eq=False):
    """Send CpuEvictor a message `seconds` from now, unless the timer is stopped before. A job has
    one timer at most."""

    job: object
    seconds: float
    message: Control


class StopTimer(msgspec.Struct, frozen=True, eq=False):
    """The job's deadline does not matter any longer."""

    job: object


Action = Send[Message] | StartTimer | StopTimer
