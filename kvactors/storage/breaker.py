"""A circuit breaker: a store that keeps failing is left alone for a while, then tried once."""

from __future__ import annotations

from kvactors.actor.clock import now

FAILURES = 5
"""Batches in a row that must fail altogether before the circuit opens."""

PAUSE = 5.0
"""Seconds an open circuit lasts before one batch may try again."""


class Breaker:
    """closed: work goes through. Open: nothing does. Half open: one batch does, and decides."""

    def __init__(self, failures: int = FAILURES, pause: float = PAUSE) -> None:
        self._limit = failures
        self._pause = pause
        self._failures = 0
        self._until: float | None = None
        self.opened = 0

    def closed(self) -> bool:
        """Whether work may go through now."""
        if self._until is None:
            return True
        if now() < self._until:
            return False
        self._until = now() + self._pause  # half open: whoever asks next waits for this one's result
        return True

    def saw(self, good: bool) -> None:
        """A batch that went through succeeded, at least in part, or failed altogether."""
        if good:
            self._failures = 0
            self._until = None
            return
        self._failures += 1
        if self._failures >= self._limit and self._until is None:
            self._until = now() + self._pause
            self.opened += 1

    def state(self) -> str:
        """closed, open or half open."""
        if self._until is None:
            return "closed"
        return "open" if now() < self._until else "half open"
