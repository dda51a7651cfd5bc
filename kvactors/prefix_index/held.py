"""Requests that wait for the end of a pause."""

from __future__ import annotations

from collections.abc import Iterator

from kvactors.actor import Envelope
from kvactors.prefix_index.actions import Action, StartTimer, Timed
from kvactors.prefix_index.messages import Acquire, AcquireResult, AdmissionDeadline


class Held(Timed):
    """One of them. ticket: of its deadline."""

    __slots__ = ("envelope", "message", "ticket")

    def __init__(self, message: Acquire, envelope: Envelope[AcquireResult], ticket: int) -> None:
        super().__init__()
        self.message = message
        self.envelope = envelope
        self.ticket = ticket


class HeldRequests:
    """Requests of a paused cache. requests: by lease, in order of arrival. tickets: numbers of
    waits."""

    def __init__(self, tickets: Iterator[int]) -> None:
        self.paused = False
        self._tickets = tickets
        self.requests: dict[int, Held] = {}

    def __len__(self) -> int:
        return len(self.requests)

    def hold(self, message: Acquire, envelope: Envelope[AcquireResult]) -> list[Action]:
        """Let a request wait."""
        held = Held(message, envelope, next(self._tickets))
        self.requests[message.lease] = held
        return [StartTimer(held, message.deadline, AdmissionDeadline(message.lease, held.ticket))]

    def take_next(self) -> Held | None:
        """Remove the request that has waited longest; None during a pause or if there is none."""
        if self.paused or not self.requests:
            return None
        return self._remove(next(iter(self.requests)))

    def cancel(self, lease: int) -> Held | None:
        """Remove a request that was cancelled."""
        return self._remove(lease) if lease in self.requests else None

    def expire(self, lease: int, ticket: int) -> Held | None:
        """Remove a request whose deadline has passed; None if the ticket is not of this wait."""
        held = self.requests.get(lease)
        return None if held is None or held.ticket != ticket else self._remove(lease)

    def _remove(self, lease: int) -> Held:
        held = self.requests.pop(lease)
        held.stop_timer()
        return held
