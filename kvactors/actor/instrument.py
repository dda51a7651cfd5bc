"""Instruments: observers of every message, turn and failure of one system.

Traces, metrics and test recorders are instruments. A system without any pays one branch a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from kvactors.actor.log import described, get_logger
from kvactors.actor.message import Envelope

if TYPE_CHECKING:
    from kvactors.actor.actor import Actor
    from kvactors.actor.ref import ActorRef

log = get_logger()


class InjectedFailure(Exception):
    """Raised by an instrument in `taken` or `finished` to fail the actor on purpose, for fault
    injection. Any other exception of an instrument fails the instrument only."""


class Turn(NamedTuple):
    """A turn in progress. envelope: of the message it handles, None in `Actor.started`."""

    actor: ActorRef
    envelope: Envelope[Any] | None


class Instrument:
    """Observes a system. Derive from this class and override the methods needed.

    Methods run inside the step that they observe: they must be brief, and must not send messages.
    An instrument that raises is logged once and removed. The actors continue.

    An ask that ends without a reply (deadline, withdrawn by its asker) is not reported here. Add a
    callback to `envelope.reply` in `sent` to see that too.
    """

    def sent(self, receiver: ActorRef, envelope: Envelope[Any], turn: Turn | None) -> None:
        """A message has entered the receiver's channel. turn: the turn in which it was sent, which
        gives the sender and the message that caused this one; None for asks from outside, timers
        and ends of jobs."""

    def dropped(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        """A message was removed from the channel without a turn: its receiver failed or stopped."""

    def taken(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        """The receiver begins a turn with this message. A message for an earlier incarnation, and
        an ask that was given up, are skipped within their turn."""

    def finished(self, receiver: ActorRef, envelope: Envelope[Any]) -> None:
        """The turn has ended without an exception."""

    def answered(
        self, receiver: ActorRef, envelope: Envelope[Any], value: Any, error: Exception | None
    ) -> None:
        """An ask got its reply from its receiver: a value, or an error."""

    def failed(self, actor: ActorRef, error: BaseException) -> None:
        """An actor's incarnation ends with an error."""

    def started(self, actor: Actor) -> None:
        """An incarnation is about to take its first turn."""

    def stopped(self, actor: Actor) -> None:
        """An incarnation has ended, and so have its jobs (or they were given up)."""


class Instruments:
    """The instruments of one system. Every ref of the system shares this object.

    Attributes:
        active: the instruments. Senders test it once a message, so it is empty when there are none.
        turn: the turn in progress while there are instruments.
    """

    __slots__ = ("active", "turn")

    def __init__(self) -> None:
        self.active: tuple[Instrument, ...] = ()
        self.turn: Turn | None = None

    def add(self, instrument: Instrument) -> None:
        """Observe from now on. No effect if the instrument is there."""
        if instrument not in self.active:
            self.active = (*self.active, instrument)

    def remove(self, instrument: Instrument) -> None:
        """Observe no longer. No effect if the instrument is not there."""
        self.active = tuple(one for one in self.active if one is not instrument)

    def notify(self, event: str, *args: Any) -> None:
        for instrument in self.active:
            try:
                getattr(instrument, event)(*args)
            except (InjectedFailure, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                self.remove(instrument)
                log.error(
                    "instrument removed",
                    instrument=type(instrument).__name__,
                    method=event,
                    error=described(error),
                )
