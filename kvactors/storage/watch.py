"""Log lines for operators about a store, beyond its circuit breaker: corrupt objects and lack of
space."""

from __future__ import annotations

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.storage.messages import Outcome

log = get_logger()


class StoreWatch:
    """Follows the outcomes of a store's batches.

    Attributes:
        store: name of the store, for the log.
        full_since: when writes began to find no space, on the loop's clock. None if the last batch
            with a result found some.
    """

    def __init__(self, store: str) -> None:
        self.store = store
        self.full_since: float | None = None

    def read(self, outcomes: bytes) -> None:
        """A batch was read: one `Outcome` byte a key."""
        corrupt = outcomes.count(Outcome.CORRUPT)
        if corrupt:
            log.error("corrupt object", store=self.store, objects=corrupt)

    def written(self, outcomes: bytes) -> None:
        """A batch was written: one `Outcome` byte a key."""
        if Outcome.OK in outcomes:
            if self.full_since is not None:
                log.info(
                    "store has space again",
                    store=self.store,
                    full_for=round(now() - self.full_since, 3),
                )
            self.full_since = None
        elif Outcome.NO_SPACE in outcomes and self.full_since is None:
            self.full_since = now()
            log.warning("store is full", store=self.store, objects=len(outcomes))
