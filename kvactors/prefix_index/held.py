"""Requests before they are admitted: those that wait for the end of a pause, and those that wait
until other requests release device blocks. They hold nothing: no block, no reference, no load.
Forks wait alike: only the lease that is forked holds blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile
from typing import Any, Generic, TypeVar

from kvactors.actor import Envelope
from kvactors.prefix_index.actions import StartTimer, Timed
from kvactors.prefix_index.messages import Acquire, AdmissionDeadline, Fork

M = TypeVar("M", bound=Acquire | Fork)


class Held(Timed, Generic[M]):
    """A waiting request.

    Attributes:
        ticket: of its deadline.
        claim: device blocks that it uses once it is granted.
        since: `Admission.overtakings` when it began to wait.
    """

    __slots__ = ("claim", "envelope", "message", "since", "ticket")

    def __init__(self, message: M, envelope: Envelope[Any], ticket: int) -> None:
        super().__init__()
        self.message: M = message
        self.envelope = envelope
        self.ticket = ticket
        self.claim = self.since = 0


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
    """Requests that wait for device blocks which other requests use (`wait_for_room`), in the order
    of their calls.

    Attributes:
        retried: requests that have left the queue to be matched, over several turns, and may come
            back to their place, by lease.
        claims: blocks of the queue's requests, see `Held`.
    """

    def __init__(self, tickets: Iterator[int]) -> None:
        super().__init__(tickets)
        self.retried: dict[int, Held[M]] = {}
        self.claims = 0

    @property
    def first(self) -> Held[M] | None:
        """The request that has waited longest."""
        waiting: Any = self.retried or self.requests
        first: Held[M] | None = next(iter(waiting.values()), None)
        return first

    def enter(self, message: M, envelope: Envelope[Any], claim: int, since: int) -> StartTimer:
        """Let a request wait. One that waited before has its place again.

        Args:
            message: the request.
            envelope: of its call.
            claim: see `Held`.
            since: see `Held`, of a request that waits for the first time.
        """
        before, number = self.retried.pop(message.lease, None), number_of(message)
        later = list(takewhile(lambda one: number_of(one.message) > number, self._backwards()))
        if before is not None or later:
            since = (before or later[-1]).since
        timer = self.hold(message, envelope)
        held = self.requests[message.lease]
        held.claim, held.since = claim, since
        self.claims += claim
        for one in reversed(later):
            self.requests.move_to_end(one.message.lease)
        return timer

    def remove(self, lease: int) -> Held[M] | None:
        """See `RequestQueue.remove`."""
        held = super().remove(lease)
        if held is not None:
            self.claims -= held.claim
        return held

    def retry(self, lease: int) -> None:
        """A request leaves the queue to be admitted."""
        held = self.remove(lease)
        if held is not None:
            self.retried[lease] = held

    def _backwards(self) -> Iterator[Held[M]]:
        return (self.requests[lease] for lease in reversed(self.requests))


def number_of(message: Acquire | Fork) -> int:
    """Ascending in the order of calls: the number of the lease that the request is for."""
    return message.lease if isinstance(message, Acquire) else message.leases[0]
