"""Open asks to wait until sinks have acknowledged the changes that were due."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvactors.actor import Envelope
from kvactors.flush_notifier.deliveries import SinkDelivery


class FlushWaiter(NamedTuple):
    """An open ask.

    Attributes:
        marks: by sink the `SinkView.clock` that its view must reach, None until the call in flight
            ends.
    """

    envelope: Envelope[bool]
    marks: dict[SinkDelivery, int | None]


class FlushWaiters:
    """Open asks to wait until sinks have acknowledged the changes that were due at the ask."""

    def __init__(self) -> None:
        self._waiters: list[FlushWaiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, envelope: Envelope[bool], sinks: Iterable[SinkDelivery]) -> None:
        """Wait for these sinks. The batch of a call in flight may be out of date, so what must be
        corrected after it is known when the call ends."""
        marks = {one: None if one.in_flight else one.view.clock for one in sinks}
        self._waiters.append(FlushWaiter(envelope, marks))

    def call_ended(self, one: SinkDelivery, *, cleared: bool) -> None:
        """A call to a sink ended. cleared: it removed everything, so that blocks which have come
        back since are sent again."""
        for waiter in self._waiters:
            if one in waiter.marks and (waiter.marks[one] is None or cleared):
                waiter.marks[one] = one.view.clock

    def take_done(self) -> list[Envelope[bool]]:
        """Remove and return the asks whose sinks have acknowledged the changes that were due."""
        done = [
            waiter
            for waiter in self._waiters
            if all(_reached(one, mark) for one, mark in waiter.marks.items())
        ]
        for waiter in done:
            self._waiters.remove(waiter)
        return [waiter.envelope for waiter in done]

    def take_abandoned(self) -> list[Envelope[bool]]:
        """Remove and return the asks that were given up."""
        abandoned = [one.envelope for one in self._waiters if one.envelope.abandoned]
        self._waiters = [one for one in self._waiters if not one.envelope.abandoned]
        return abandoned


def _reached(one: SinkDelivery, mark: int | None) -> bool:
    current = one.begun and not one.batch.cleared
    return mark is not None and current and one.view.delivered_until >= mark
