"""State of a rank at its leader: health, operations in flight, and counts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from kvactors.data_plane.ranks.connection import Connection
from kvactors.data_plane.ranks.protocol import (
    MOST_NAMES,
    PAGE_NAMES,
    WINDOW,
    Identity,
    Names,
    Ping,
    RankAnswer,
    SendNames,
)
from kvactors.errors import RankError
from kvactors.types import HASH_BYTES

# -- An authenticated connection of a leader to a rank, from the rank's identity to the disconnect.


PING_LIMIT = 5.0
"""Seconds in which a rank must answer to keep its number when another process claims it."""

PAGE_LIMIT = 20.0
"""Seconds that a joining rank may take for the next page of names."""


class Violation(RankError):
    """A rank violated the protocol."""


class Link:
    """identity: the rank's. received: names that have arrived while it joins. admitted:
    whether it takes part in operations."""

    def __init__(self, connection: Connection, identity: Identity) -> None:
        self.connection = connection
        self.identity = identity
        self.received = 0
        self.admitted = False
        self._pages: deque[Names] = deque()
        self._asked = 0
        self._page: asyncio.Future[None] | None = None
        self._pong: asyncio.Future[bool] | None = None

    async def answers(self, limit: float = PING_LIMIT) -> bool:
        """Whether the rank answers a ping in `limit` seconds; False at once when the connection is
        lost."""
        if self._pong is None or self._pong.done():
            self._pong = asyncio.get_running_loop().create_future()
            self.connection.send(Ping())
        pong = self._pong
        await asyncio.wait((pong,), timeout=limit)
        return pong.done() and pong.result()

    def pong(self) -> None:
        if self._pong is not None and not self._pong.done():
            self._pong.set_result(True)

    def names(self, page: Names) -> None:
        """A page of names has arrived. Violation if it was not asked for or is not a page."""
        if not self._asked:
            raise Violation("names that were not asked for")
        if (
            len(page.keys) % HASH_BYTES
            or len(page.keys) > PAGE_NAMES * HASH_BYTES
            or not (page.keys or page.last)
        ):
            raise Violation(f"a page of {len(page.keys)} bytes of names")
        self._asked -= 1
        self.received += len(page.keys) // HASH_BYTES
        if self.received > min(self.identity.objects, MOST_NAMES):
            raise Violation(f"{self.received} names, {self.identity.objects} were announced")
        self._pages.append(page)
        if self._page is not None and not self._page.done():
            self._page.set_result(None)

    async def next_page(self) -> Names | None:
        """The next page of names, with WINDOW pages in flight; None after PAGE_LIMIT seconds
        without one, or when the connection is lost."""
        more = WINDOW - self._asked - len(self._pages)
        if more > 0:
            self._asked += more
            self.connection.send(SendNames(more))
        if not self._pages:
            self._page = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._page,), timeout=PAGE_LIMIT)
        return self._pages.popleft() if self._pages else None

    def over(self) -> None:
        """The connection is lost: close it, and wake the tasks that wait for the rank."""
        self.connection.close()
        for waiting, result in ((self._pong, False), (self._page, None)):
            if waiting is not None and not waiting.done():
                waiting.set_result(result)  # type: ignore[arg-type]


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


@dataclass(slots=True, eq=False)
class RankOperation:
    """An operation in flight on one rank. stored: whether the rank's store carries it out."""

    answer: asyncio.Future[RankAnswer | None]
    arrived: Callable[[int], None] | None
    outcomes: int
    worst: int
    stored: bool
    timer: asyncio.TimerHandle | None = None

    def check(self, answer: RankAnswer) -> None:
        """Violation unless the answer is one to this operation."""
        if len(answer.outcomes) != self.outcomes:
            raise Violation(f"{len(answer.outcomes)} outcomes for {self.outcomes} pairs or keys")
        if max(answer.outcomes, default=0) > self.worst:
            raise Violation(f"outcome {max(answer.outcomes)}, the greatest is {self.worst}")
        if len(answer.gone) % HASH_BYTES:
            raise Violation(f"{len(answer.gone)} bytes of names")

    def over(self, answer: RankAnswer | None) -> None:
        """The operation has ended; None if it did not succeed."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.answer.done():
            self.answer.set_result(answer)


class Rank:
    """One rank's number. link: its connection, joining or admitted. overdue: operations whose
    answer is late."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.link: Link | None = None
        self.health = RankState.DISCONNECTED
        self.reason = "has not connected"
        self.since = self.not_before = 0.0
        self.open: dict[int, RankOperation] = {}
        self.overdue: set[int] = set()
        self.operations = self.losses = self.silences = self.violations = 0

    def settle(self) -> None:
        """Every operation has ended, and did not succeed."""
        operations, self.open = self.open, {}
        self.overdue.clear()
        for operation in operations.values():
            operation.over(None)

    def statistics(self) -> RankStatistics:
        troubles = self.losses, self.silences, self.violations
        return RankStatistics(
            self.number, self.health.value, self.operations, len(self.open), *troubles
        )

    def describe(self) -> RankHealth:
        state, reason, link = self.health.value, self.reason, self.link
        if link is not None and not link.admitted:
            state = "joining"
            reason = f"{link.received} of {link.identity.objects} names received"
        return RankHealth(self.number, state, reason, self.since)
