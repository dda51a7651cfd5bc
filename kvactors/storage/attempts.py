"""Record of a store's attempts, one for each kind of call: whether they work, and when to pause.

Reads that work prove nothing about writes, so each kind is judged alone. An attempt is a call that
reached the store's medium. An answer from memory proves nothing about the medium and counts neither
way: a look-up in a table, an object that is there already, a block that a quota refuses, a call
that was too late to begin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.storage.messages import Outcome

log = get_logger()

FAILURES = 5
"""Attempts in a row that must fail before calls of their kind count as failing."""

PAUSE_S = 5.0
"""Seconds without calls of a kind whose attempts are UNAVAILABLE, before one may try again."""

REMEDIES = {
    Outcome.UNAVAILABLE: (
        "a call was unavailable",
        "Repair the disk, folder, service or access rights. The next call that works ends this",
    ),
    Outcome.NO_SPACE: ("no space", "Free space in the store"),
    Outcome.CORRUPT: (
        "every object was corrupt",
        "Check the disk, for a file store with `kvactors store verify`",
    ),
}
"""Outcomes of failed attempts, the one that decides first: reason without a better one, remedy."""


class Failing(NamedTuple):
    """Calls of a kind that do not work."""

    why: str
    since: float


class Attempts:
    """Attempts of one kind, and their circuit breaker.

    Closed: calls go through. Open: none does. Half open: one call does, and decides. Only attempts
    that were UNAVAILABLE open it: a full store, or one with corrupt objects, is asked on. The first
    change of `failing` is logged, and its end once nothing has failed for PAUSE_S: a store on the
    edge of its space changes several times a second."""

    def __init__(self, store: str, kind: str, more_space: str = "") -> None:
        self.reason = ""  # why the last attempts failed, if the calls are failing
        self._store = store
        self.kind = kind
        self._remedy = ""
        self._more_space = more_space  # remedy of the store's kind
        self._failures = 0  # in a row
        self._since = self._last = 0.0  # the first failure, and the last one
        self._logged = False
        self._until: float | None = None  # end of the pause

    def allow(self) -> bool:
        """Whether a call may begin now. A half open breaker allows one, and pauses again."""
        if self._until is None:
            return True
        if now() < self._until:
            return False
        self._until = now() + PAUSE_S
        return True

    @property
    def paused(self) -> bool:
        """Whether no call may begin now. Unlike `allow` it uses no trial up."""
        return self.pauses_at(now)

    def pauses_at(self, clock: Callable[[], float]) -> bool:
        """`paused` by a clock that also runs outside of the loop's thread."""
        return self._until is not None and clock() < self._until

    @property
    def state(self) -> str:
        if self._until is None:
            return "closed"
        return "open" if self.paused else "half open"

    @property
    def failing(self) -> Failing | None:
        if self._failures < FAILURES:
            return None
        why = f"no {self.kind} has worked in the last {FAILURES} attempts or more: {self.reason}"
        return Failing(f"{why}. {self._remedy}", self._since)

    def record(self, outcomes: bytes, reason: str = "") -> None:
        if Outcome.OK in outcomes:
            self.worked()
            return
        for outcome in REMEDIES:
            if outcome in outcomes:
                self.failed(reason if outcome == Outcome.UNAVAILABLE else "", outcome)
                return

    def worked(self) -> None:
        if self._logged and now() - self._last >= PAUSE_S:
            self._logged = False
            log.info(
                "store works again",
                store=self._store,
                call=self.kind,
                failed_for=round(now() - self._since, 3),
            )
        self._failures, self._until, self.reason = 0, None, ""

    def failed(self, reason: str = "", outcome: Outcome = Outcome.UNAVAILABLE) -> None:
        """Record an attempt of which nothing worked. outcome: a key of `REMEDIES`."""
        default, self._remedy = REMEDIES[outcome]
        if outcome == Outcome.NO_SPACE:
            self._remedy = self._more_space or self._remedy
        flaps = self._logged and now() - self._last < PAUSE_S
        if not self._failures and not flaps:
            self._since, self._logged = now(), False
        self._last = now()
        self._failures += 1
        if self._failures < FAILURES:
            return
        self.reason = reason or default
        self._until = now() + PAUSE_S if outcome == Outcome.UNAVAILABLE else None
        if not self._logged:
            self._logged = True
            log.warning("store fails", store=self._store, call=self.kind, reason=self.reason)


class StoreAttempts:
    """Attempts of a store, by kind."""

    def __init__(self, store: str, more_space: str = "") -> None:
        self.lookups = Attempts(store, "look-up", more_space)
        self.reads = Attempts(store, "read", more_space)
        self.writes = Attempts(store, "write", more_space)
        self._kinds = (self.lookups, self.reads, self.writes)

    @property
    def state(self) -> str:
        states = {kind.state for kind in self._kinds}
        return next((state for state in ("open", "half open") if state in states), "closed")

    def failing(self) -> Iterator[Failing]:
        for kind in self._kinds:
            if kind.failing is not None:
                yield kind.failing

    def loads_paused(self, clock: Callable[[], float]) -> str:
        """Why no object can be found or read now, empty if objects can be. For any thread."""
        found = [kind.failing for kind in (self.lookups, self.reads) if kind.pauses_at(clock)]
        return next((one.why for one in found if one is not None), "")
