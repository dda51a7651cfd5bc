"""State of a rank at its leader: health, operations in flight, and counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvactors.data_plane.ranks.link import Link, Violation
from kvactors.data_plane.ranks.protocol import Answer
from kvactors.types import HASH_BYTES


class RankState(Enum):
    """The state of a rank."""

    DISCONNECTED = "away"
    HEALTHY = "healthy"
    SILENT = "silent"


class RankStatistics(NamedTuple):
    """The state of one rank at this moment.

    Attributes:
        rank: its number.
        health: healthy, joining, away or silent.
        operations: operations sent to it.
        in_flight: operations that it has not answered.
        losses: how often its connection was lost.
        silences: how often an answer was late.
        violations: how often it violated the protocol.
    """

    rank: int
    health: str
    operations: int
    in_flight: int
    losses: int
    silences: int
    violations: int


class RankHealth(NamedTuple):
    """state: healthy, away, silent, or joining (connected, not admitted yet). reason: why it is not
    healthy. since: when that began, on the clock of the loop."""

    rank: int
    state: str
    reason: str
    since: float


class Operation:
    """An operation in flight on one rank.

    Attributes:
        arrived: called with layers.
        outcomes, worst: requirements on the answer.
        stored: whether the rank's store carries it out.
    """

    __slots__ = ("answer", "arrived", "outcomes", "stored", "timer", "worst")

    def __init__(
        self,
        answer: asyncio.Future[Answer | None],
        arrived: Callable[[int], None] | None,
        outcomes: int,
        worst: int,
        *,
        stored: bool = False,
    ) -> None:
        self.stored = stored
        self.answer = answer
        self.arrived = arrived
        self.outcomes = outcomes
        self.worst = worst
        self.timer: asyncio.TimerHandle | None = None

    def check(self, answer: Answer) -> None:
        """Violation unless the answer is one to this operation."""
        if len(answer.outcomes) != self.outcomes:
            raise Violation(f"{len(answer.outcomes)} outcomes for {self.outcomes} pairs or keys")
        if max(answer.outcomes, default=0) > self.worst:
            raise Violation(f"outcome {max(answer.outcomes)}, the greatest is {self.worst}")
        if len(answer.gone) % HASH_BYTES:
            raise Violation(f"{len(answer.gone)} bytes of names")

    def over(self, answer: Answer | None) -> None:
        """The operation has ended; None if it did not succeed."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.answer.done():
            self.answer.set_result(answer)


class Rank:
    """One rank's number.

    Attributes:
        link: its connection, joining or admitted.
        open: operations in flight.
        overdue: those whose answer is late.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.link: Link | None = None
        self.health = RankState.DISCONNECTED
        self.reason = "has not connected"
        self.since = self.not_before = 0.0
        self.open: dict[int, Operation] = {}
        self.overdue: set[int] = set()
        self.operations = self.losses = self.silences = self.violations = 0

    def settle(self) -> None:
        """Every operation has ended, and did not succeed."""
        operations, self.open = self.open, {}
        self.overdue.clear()
        for operation in operations.values():
            operation.over(None)

    def penalize(self, at: float, least: float, most: float) -> None:
        """Admit it later than before: it violated the protocol."""
        self.violations += 1
        self.not_before = at + min(most, least * 2 ** min(16, self.violations - 1))

    def statistics(self) -> RankStatistics:
        """See `RankStatistics`."""
        return RankStatistics(
            self.number,
            self.health.value,
            self.operations,
            len(self.open),
            self.losses,
            self.silences,
            self.violations,
        )

    def describe(self) -> RankHealth:
        """See `RankHealth`."""
        if self.link is not None and not self.link.admitted:
            link = self.link
            return RankHealth(
                self.number,
                "joining",
                f"{link.received} of {link.identity.objects} names received",
                self.since,
            )
        return RankHealth(self.number, self.health.value, self.reason, self.since)
