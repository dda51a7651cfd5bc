"""Circuit breaker: a store that keeps failing gets no batches for a while, then one to try."""

from __future__ import annotations

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger

log = get_logger()

FAILURES = 5
"""Batches in a row that must fail altogether before the circuit opens."""

PAUSE = 5.0
"""Seconds an open circuit lasts before one batch may try again."""


class Breaker:
    """closed: work goes through. Open: nothing does. Half open: one batch does, and decides. Both
    changes are logged, once each.

    Attributes:
        store: name of the store, for the log.
    """

    def __init__(self, failures: int = FAILURES, pause: float = PAUSE, store: str = "") -> None:
        self.store = store
        self.reason = ""  # why it opened, empty while it is closed
        self._limit = failures
        self._pause = pause
        self._failures = 0
        self._until: float | None = None
        self.since: float | None = None  # when it opened, on the loop's clock
        self.opened = 0

    def closed(self) -> bool:
        """Whether work may go through now."""
        if self._until is None:
            return True
        if now() < self._until:
            return False
        self._until = (
            now() + self._pause
        )  # half open: later batches wait for the result of this one
        return True

    def saw(self, good: bool, reason: str = "") -> None:
        """Record a batch.

        Args:
            good: whether any part of the batch succeeded.
            reason: why it failed, for the log.
        """
        if good:
            if self._until is not None:
                log.info("store works again", store=self.store, reason=self.reason)
            self._failures, self._until, self.since, self.reason = 0, None, None, ""
            return
        self._failures += 1
        if self._failures >= self._limit and self._until is None:
            self.since = now()
            self._until = self.since + self._pause
            self.opened += 1
            self.reason = reason or "every object of several batches failed"
            log.warning(
                "store left alone",
                store=self.store,
                reason=self.reason,
                batches=self._failures,
                seconds=self._pause,
            )

    def state(self) -> str:
        """closed, open or half open."""
        if self._until is None:
            return "closed"
        return "open" if now() < self._until else "half open"
