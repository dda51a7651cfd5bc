"""Requests before they are admitted: those that wait for the end of a pause, and those that wait
until other requests release device blocks. They hold nothing: no block, no reference, no load.
Forks wait alike: only the lease that is forked holds blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from kvactors.actor import Envelope
from kvactors.prefix_index.actions import StartTimer, Timed
from kvactors.prefix_index.messages import Acquire, AdmissionDeadline, Fork

M = TypeVar("M", Acquire, Fork)


class Held(Timed, Generic[M]):
    """One of them.

    Attributes:
        ticket: of its deadline.
    """

    __slots__ = ("envelope", "message", "ticket")

    def __init__(self, message: M, envelope: Envelope[Any], ticket: int) -> None:
        super().__init__()
        self.message: M = message
        self.envelope = envelope
        self.ticket = ticket


class RequestQueue(Generic[M]):
    """First come, first served.

    Args:
        tickets: numbers of waits.

    Attributes:
        requests: by lease, in order of arrival.
    """

    def __init__(self, tickets: Iterator[int]) -> None:
        self._tickets = tickets
        self.requests: OrderedDict[int, Held[M]] = OrderedDict()

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def first(self) -> Held[M] | None:
        """The request that has waited longest."""
        return next(iter(self.requests.values()), None)

    def hold(self, message: M, envelope: Envelope[Any]) -> StartTimer:
        """Let a request wait until its deadline."""
        held = Held(message, envelope, next(self._tickets))
        self.requests[message.lease] = held
        return StartTimer(held, message.deadline, AdmissionDeadline(message.lease, held.ticket))

    def remove(self, lease: int) -> Held[M] | None:
        """The request of a lease does not wait any more. None if it did not."""
        held = self.requests.pop(lease, None)
        if held is not None:
            held.stop_timer()
        return held

    def expire(self, lease: int, ticket: int) -> Held[M] | None:
        """Remove a request whose deadline has passed. None if the ticket is not of this wait."""
        held = self.requests.get(lease)
        return None if held is None or held.ticket != ticket else self.remove(lease)


class HeldRequests(RequestQueue[Acquire]):
    """Requests of a paused cache."""

    def __init__(self, tickets: Iterator[int]) -> None:
        super().__init__(tickets)
        self.paused = self.asleep = False

    @property
    def is_closed(self) -> bool:
        """Whether a new request is held or refused."""
        return self.paused or self.asleep or bool(self.requests)

    def take_next(self) -> Held[Acquire] | None:
        """Remove the request that has waited longest. None during a pause or if there is none."""
        if self.paused or self.asleep or not self.requests:
            return None
        return self.remove(next(iter(self.requests)))


class SpaceQueue(RequestQueue[M]):
    """Requests that wait for device blocks which other requests use (`wait_for_room`).

    Attributes:
        retried: leases of those that have left the queue to be matched, over several turns, and may
            come back to its front.
    """

    def __init__(self, tickets: Iterator[int]) -> None:
        super().__init__(tickets)
        self.retried: set[int] = set()

    @property
    def is_busy(self) -> bool:
        """Whether later requests must wait behind one of this queue."""
        return bool(self.requests or self.retried)

    def hold_first(self, message: M, envelope: Envelope[Any]) -> StartTimer:
        """Let a request wait that came before all others in the queue."""
        self.retried.discard(message.lease)
        timer = self.hold(message, envelope)
        self.requests.move_to_end(message.lease, last=False)
        return timer

    def hold_again(self, message: M, envelope: Envelope[Any]) -> StartTimer:
        """Let a request wait, before all others if it has left the queue to be retried."""
        again = message.lease in self.retried
        return (self.hold_first if again else self.hold)(message, envelope)

    def retry(self, lease: int) -> None:
        """The first request leaves the queue to be admitted."""
        self.remove(lease)
        self.retried.add(lease)
