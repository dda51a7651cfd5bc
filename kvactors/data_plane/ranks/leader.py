"""The leader's side of its ranks: every operation is sent to all of them at once, and the answers
are gathered without a barrier.

A rank that does not answer in time is silent: from then on no operation is sent to any rank, and
every operation fails at once, until the rank has answered all outstanding operations. A rank whose
store is late is not silent as long as it answers a ping: copies continue. Operations of a silent
rank stay open, and with them their slots and device blocks: a process that was stopped in the
middle of a copy may go on with it at any moment. A rank whose connection is lost may have lost its
memory, so all blocks cached before are void. Its operations have ended when it connects again (it
finishes them before it sends its identity).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import count
from typing import NamedTuple

import anyio

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import uncancelled, wait_uncancelled
from kvactors.data_plane.ranks.connection import LIMIT, Connection, Listener, check_rank, refuse
from kvactors.data_plane.ranks.names import RankNames, in_slices
from kvactors.data_plane.ranks.protocol import (
    FROM_RANK_BYTES,
    MOST_NAMES,
    PAGE_NAMES,
    Arrived,
    Frame,
    Identity,
    MoveDevice,
    Names,
    Ping,
    Pong,
    RankAnswer,
    SendNames,
    StoreObjects,
    Welcome,
)
from kvactors.errors import RankError
from kvactors.identity import StoreIdentity
from kvactors.settings.ranks import RanksConfig, Secret
from kvactors.tables import Unclaimed
from kvactors.types import HASH_BYTES

log = get_logger()

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
        self._page: asyncio.Future[Names | None] | None = None
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
        if self._page is None or self._page.done():
            raise Violation("names that were not asked for")
        if (
            len(page.keys) % HASH_BYTES
            or len(page.keys) > PAGE_NAMES * HASH_BYTES
            or not (page.keys or page.last)
        ):
            raise Violation(f"a page of {len(page.keys)} bytes of names")
        self.received += len(page.keys) // HASH_BYTES
        if self.received > min(self.identity.objects, MOST_NAMES):
            raise Violation(f"{self.received} names, {self.identity.objects} were announced")
        self._page.set_result(page)

    async def next_page(self) -> Names | None:
        """The next page of names; None after PAGE_LIMIT seconds without one, or when the connection
        is lost."""
        self._page = asyncio.get_running_loop().create_future()
        self.connection.send(SendNames())
        done, _ = await asyncio.wait((self._page,), timeout=PAGE_LIMIT)
        return self._page.result() if done else None

    def over(self) -> None:
        """The connection is lost: close it, and wake the tasks that wait for the rank."""
        self.connection.close()
        if self._pong is not None and not self._pong.done():
            self._pong.set_result(False)
        if self._page is not None and not self._page.done():
            self._page.set_result(None)


class RankState(Enum):
    """The state of a rank."""

    DISCONNECTED = "away"
    HEALTHY = "healthy"
    SILENT = "silent"


class RankStatistics(NamedTuple):
    """The state of one rank at this moment.

    Attributes:
        rank: its number.
        health: healthy, joining (connected, not admitted yet), away or silent.
        operations: operations sent.
        in_flight: operations not answered.
        losses: lost connections.
        silences: late answers.
        violations: violations of the protocol.
        reason: why it is not healthy.
        since: when that began, on the loop's clock.
    """

    rank: int
    health: str
    operations: int
    in_flight: int
    losses: int
    silences: int
    violations: int
    reason: str = ""
    since: float = 0.0


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
        health, reason, link = self.health.value, self.reason, self.link
        if link is not None and not link.admitted:
            health = "joining"
            reason = f"{link.received} of {link.identity.objects} names received"
        counts = self.operations, len(self.open), self.losses, self.silences, self.violations
        return RankStatistics(self.number, health, *counts, reason, self.since)


def misfit(identity: Identity, wanted: RankGroup) -> str:
    """Why a rank does not meet the requirements, with both values. Empty if it meets them."""
    ours, count = wanted.identity, wanted.config.count
    rows = (
        ("rank count", identity.ranks, count),
        ("model", identity.model, ours.model),
        ("storage namespace", identity.namespace, ours.namespace),
        ("storage back end", identity.storage, wanted.storage),
        (
            "layout or storage.head_ranges",
            identity.fingerprint.hex()[:16],
            ours.fingerprint.hex()[:16],
        ),
        ("device blocks", identity.blocks, wanted.blocks),
        ("host slots", identity.slots, wanted.slots),
    )
    for name, theirs, own in rows:
        if theirs != own:
            return f"rank {identity.rank} has {name} {theirs!r}, the leader has {own!r}"
    if not 0 <= identity.rank < count:
        return f"there is no rank {identity.rank} of {count}"
    if not 0 <= identity.objects <= MOST_NAMES:
        return (
            f"rank {identity.rank} has {identity.objects} stored objects, at most {MOST_NAMES} are "
            "possible"
        )
    return ""


# -- All ranks of a cache.


UNCLAIMED = 32
"""Connections without a rank's place at most, and two more for each rank. The oldest is closed for
a new one."""

PENALTY_LEAST, PENALTY_MOST = 0.5, 30.0
"""Seconds a rank must wait after it violated the protocol before it is admitted again. Doubled each
time."""


class RankGroup:
    """All ranks of one cache. memory_generation: the count of losses of memory. names: keys that
    the stores of all ranks hold, if there are stores. layers: of a block. used: whether a cache
    relies on the ranks' memory. refused: refused connections by kind."""

    def __init__(
        self,
        config: RanksConfig,
        identity: StoreIdentity,
        blocks: int,
        slots: int,
        *,
        storage: str = "none",
        layers: int = 1 << 16,
    ) -> None:
        self.config = config
        self.identity = identity
        self.blocks = blocks
        self.slots = slots
        self.storage = storage
        self.layers = layers
        self.changed: Callable[[int, RankState], None] = lambda _rank, _health: None
        self.names: RankNames | None = None
        self.memory_generation = 0
        self.refused: Counter[str] = Counter()
        self._misfits: list[str] = []  # the latest reasons, for the error of `open`
        self._ops = count(1)
        self.used = False
        self._secret = Secret(config.secret)
        self._unclaimed = Unclaimed(UNCLAIMED + 2 * config.count, self._displace)
        self._admission: asyncio.Future[None] | None = None
        self._pings: set[asyncio.Task[None]] = set()
        self._begin()

    def _begin(self) -> None:
        """As before `open`."""
        self._ranks = [Rank(number) for number in range(self.config.count)]
        self._joining: asyncio.Task[None] | None = None  # of the rank that connected last
        self._progress = 0.0  # when the last page of names arrived
        self._closing = False
        self._listener = Listener(
            self.accept, lambda source, why: self._refused(source, "another user", why)
        )

    @property
    def healthy(self) -> bool:
        return not self._closing and all(rank.health is RankState.HEALTHY for rank in self._ranks)

    async def open(self) -> None:
        """Listen, and wait until every rank was admitted. Can be called again after a failure."""
        try:
            began = self._progress = now()
            for rank in self._ranks:
                rank.since = began
            await self._listener.start(self.config.endpoint)
            while not self.healthy:
                until = began + self.config.startup_timeout_s
                if self._joining is not None and not self._joining.done():
                    until = max(until, self._progress + PAGE_LIMIT)
                left = until - now()
                if left <= 0:
                    break
                self._admission = asyncio.get_running_loop().create_future()
                await asyncio.wait((self._admission,), timeout=left)
            if not self.healthy:
                raise RankError(self._lacking())
        except BaseException:
            await uncancelled(self.close())
            self._begin()
            raise

    def _lacking(self) -> str:
        """The ranks that did not join in time, and the refused connections."""
        missing = [rank.number for rank in self._ranks if rank.health is not RankState.HEALTHY]
        refused = [f"{number} connections refused: {kind}" for kind, number in self.refused.items()]
        details = "; ".join([*self._misfits, *refused])
        endpoint = self.config.endpoint
        text = f"ranks {missing} of {len(self._ranks)} did not come to {endpoint} in time"
        return f"{text} ({details})" if details else text

    def abandon_pending(self) -> None:
        """Nothing will be reused any more: operations that wait for a silent or lost rank need not
        wait longer."""
        self._closing = True
        for rank in self._ranks:
            if rank.health is not RankState.HEALTHY:
                rank.settle()

    async def close(self) -> None:
        self._closing = True
        for rank in self._ranks:
            rank.settle()
            if rank.link is not None:
                rank.link.over()  # ends the pings, too
        await self._listener.stop()

    # -- operations

    async def scatter(
        self,
        build: Callable[[int], Frame],
        arrived: Callable[[int], None] | None = None,
        *,
        outcomes: int,
        worst: int = 1,
        incomplete: bool = False,
        only: int | None = None,
    ) -> list[RankAnswer | None]:
        """Send the message that `build` makes for an operation number to every rank. Returns an
        answer for each, None for a rank without one. While a rank is disconnected or silent no
        message is sent, and no rank has an answer. A cancelled call still waits until nothing is in
        flight.

        arrived: called with the layers that all ranks have, whenever there are more. outcomes: how
        many an answer must have. worst: the greatest value of an outcome. A rank with other answers
        is disconnected. incomplete: ask the healthy ranks even if others are not. only: ask
        this rank.
        """
        if not (self.healthy or (incomplete and not self._closing)):
            return [None] * len(self._ranks)
        op, loop = next(self._ops), asyncio.get_running_loop()
        message = build(op)
        stored = isinstance(message, StoreObjects | MoveDevice)
        layers = [0] * len(self._ranks)

        def note(rank: int, number: int) -> None:
            before = min(layers)
            layers[rank] = max(layers[rank], number)
            if arrived is not None and min(layers) > before:
                arrived(min(layers))

        answers: list[asyncio.Future[RankAnswer | None]] = []
        for rank in self._ranks:
            progress = None if arrived is None else partial(note, rank.number)
            operation = RankOperation(loop.create_future(), progress, outcomes, worst, stored)
            answers.append(operation.answer)
            if (
                rank.health is not RankState.HEALTHY
                or rank.link is None
                or only not in (None, rank.number)
            ):
                operation.over(None)
                continue
            rank.open[op] = operation
            self._watch(rank, op)
            rank.operations += 1
            rank.link.connection.send(message)
        await wait_uncancelled(asyncio.gather(*answers))
        return [answer.result() for answer in answers]

    # -- connections

    async def accept(self, connection: Connection) -> None:
        """Serve one connection to its end: check its secret and identity, admit the rank, and
        receive its answers."""
        if self._closing:
            return
        try:
            identity = await self._identified(connection)
            if identity is not None:
                await self._serve(self._ranks[identity.rank], Link(connection, identity))
        finally:
            self._unclaimed.discard(connection)
            connection.close()

    async def _identified(self, connection: Connection) -> Identity | None:
        """The identity of a rank that has the secret and fits, once its number is free; None if the
        connection was refused or lost."""
        refused, source = self._refused, connection.source
        self._unclaimed.add(connection)
        reason, answer = await check_rank(connection, self._secret)
        if connection not in self._unclaimed:
            return None  # closed for a newer connection
        if reason:
            refused(source, "not authenticated", reason)
            if answer:
                await refuse(connection, reason)
            return None
        connection.limit = FROM_RANK_BYTES
        identity = None
        with anyio.move_on_after(LIMIT):
            identity = await connection.receive()
        if not isinstance(identity, Identity):
            refused(source, "no identity", connection.violation or type(identity).__name__)
            return None
        reason = misfit(identity, self) or await self._claim(identity)
        if reason:
            refused(source, "does not fit", reason)
            if reason not in self._misfits:
                self._misfits = [*self._misfits[-2:], reason]
            await refuse(connection, reason)
            return None
        self._unclaimed.discard(connection)
        return identity

    def _displace(self, oldest: Connection) -> None:
        oldest.close()
        self._refused(oldest.source, "too many connections", "closed for a newer one")

    def _refused(self, source: str, kind: str, reason: str) -> None:
        self.refused[kind] += 1
        log.warning(
            "connection to the rank endpoint refused", source=source, kind=kind, reason=reason
        )

    async def _claim(self, identity: Identity) -> str:
        """Wait until the rank's number is free. Returns why it is not: another process serves it
        and answers."""
        rank = self._ranks[identity.rank]
        await asyncio.sleep(max(0.0, rank.not_before - now()))
        while (link := rank.link) is not None:
            if await link.answers():
                return f"rank {rank.number} is served by another process, which answers"
            self._lost(
                rank, link, "replaced: it did not answer when another process claimed its number"
            )
        return ""

    async def _serve(self, rank: Rank, link: Link) -> None:
        rank.link = link
        rank.since = now()
        reason = "connection lost"
        work = self._join(rank, link, self._joining)
        self._joining = joining = asyncio.get_running_loop().create_task(work)
        try:
            reason = await self._receive(rank, link)
        except Violation as violation:
            reason = f"protocol violation: {violation}"
            penalty = PENALTY_LEAST * 2 ** min(16, rank.violations)
            rank.not_before = now() + min(PENALTY_MOST, penalty)
            rank.violations += 1
            log.error("protocol violation of a rank", rank=rank.number, reason=str(violation))
        finally:
            self._lost(rank, link, reason)
            joining.cancel()
            await asyncio.wait((joining,))

    async def _join(self, rank: Rank, link: Link, before: asyncio.Task[None] | None) -> None:
        """Receive the keys in a rank's store and admit it. Ranks join one after another, so that
        the keys of one store at a time are in memory."""
        if before is not None:
            await asyncio.wait((before,))
        try:
            if self.names is None or await self._receive_keys(self.names, link):
                self._admit(rank, link)
            else:
                log.warning("rank did not send its names", rank=rank.number, received=link.received)
                self._lost(rank, link, f"no page of names in {PAGE_LIMIT:g} s")
        except Exception as error:
            log.error("rank cannot join", rank=rank.number, error=repr(error))
            self._lost(rank, link, f"cannot join: {error!r}")

    async def _receive_keys(self, names: RankNames, link: Link) -> bool:
        """Receive the keys of a rank's store. False if a page did not come in time."""
        joining = names.join(link.identity.rank, link.identity.generation)
        try:
            last = not link.identity.objects
            while joining.wanted and not last:
                page = await link.next_page()
                if page is None:
                    return False
                joining.page(page.keys)
                last = page.last
                self._progress = now()
                await asyncio.sleep(0)
            await in_slices(joining.merge())
            return True
        finally:
            joining.abandon()

    def _admit(self, rank: Rank, link: Link) -> None:
        if rank.link is not link or self._closing:
            return
        rank.settle()  # a rank sends its identity when everything from before has ended
        if self.used:  # it may have restarted more than once, unseen
            self.memory_generation += 1
            self.changed(rank.number, RankState.DISCONNECTED)
        link.admitted = True
        link.connection.send(Welcome())
        self._set(rank, RankState.HEALTHY, "")
        log.info("rank admitted", rank=rank.number, objects=link.identity.objects)

    async def _receive(self, rank: Rank, link: Link) -> str:
        """Handle a rank's messages until the connection is lost. Violation for one that the
        protocol does not allow."""
        while (message := await link.connection.receive()) is not None:
            if rank.link is not link:
                return "replaced"
            if isinstance(message, RankAnswer):
                self._answered(rank, message)
            elif isinstance(message, Arrived):
                self._arrived(rank, message)
            elif isinstance(message, Names) and not link.admitted:
                link.names(message)
            elif isinstance(message, Pong):
                link.pong()
                self._answered_ping(rank)
            else:
                raise Violation(f"unexpected message {type(message).__name__}")
        if link.connection.violation:
            raise Violation(link.connection.violation)
        return "connection lost"

    def _arrived(self, rank: Rank, message: Arrived) -> None:
        operation = rank.open.get(message.op)
        if operation is None:
            return  # the answer came first
        if operation.arrived is None or not 0 <= message.layers <= self.layers:
            raise Violation(
                f"{message.layers} layers of operation {message.op}, which has "
                f"{self.layers if operation.arrived else 0}"
            )
        operation.arrived(message.layers)

    def _answered(self, rank: Rank, message: RankAnswer) -> None:
        operation = rank.open.get(message.op)
        if operation is None:
            if self._closing:
                return
            raise Violation(f"an answer to operation {message.op}, which is not open")
        operation.check(message)
        del rank.open[message.op]
        operation.over(message)
        rank.overdue.discard(message.op)
        if rank.health is RankState.SILENT and not rank.overdue:
            self._set(rank, RankState.HEALTHY, "")

    def _lost(self, rank: Rank, link: Link, reason: str) -> None:
        link.over()
        if rank.link is not link:
            return
        rank.link = None
        if self._closing:
            rank.settle()
            return
        if not link.admitted:
            rank.reason, rank.since = reason, now()
            return
        rank.losses += 1
        self.memory_generation += 1
        self._set(rank, RankState.DISCONNECTED, reason)
        log.warning("rank lost", rank=rank.number, reason=reason, in_flight=len(rank.open))

    def _set(self, rank: Rank, health: RankState, reason: str) -> None:
        rank.health, rank.reason, rank.since = health, reason, now()
        self.changed(rank.number, health)
        if self._admission is not None and not self._admission.done():
            self._admission.set_result(None)

    # -- silence: a copy is not answered in time, or neither a store operation nor a ping is

    def _watch(self, rank: Rank, op: int) -> None:
        timeout = self.config.timeout_s
        rank.open[op].timer = asyncio.get_running_loop().call_later(timeout, self._late, rank, op)

    def _late(self, rank: Rank, op: int) -> None:
        """An answer is late. A rank whose store is slow answers a ping, one that is stopped does
        not."""
        operation = rank.open.get(op)
        if self._closing or operation is None or not operation.stored or rank.link is None:
            self._silent(rank, op)
            return
        task = asyncio.get_running_loop().create_task(self._ping(rank, op, rank.link))
        self._pings.add(task)
        task.add_done_callback(self._pings.discard)

    async def _ping(self, rank: Rank, op: int, link: Link) -> None:
        answered = await link.answers(self.config.timeout_s)
        if op not in rank.open:
            return
        if answered and not self._closing:
            self._watch(rank, op)
        else:
            self._silent(rank, op)

    def _silent(self, rank: Rank, op: int) -> None:
        if self._closing:
            rank.settle()
        elif op in rank.open:
            rank.overdue.add(op)
            if rank.health is RankState.HEALTHY:
                rank.silences += 1
                self._set(rank, RankState.SILENT, f"no answer in {self.config.timeout_s:g} s")

    def _answered_ping(self, rank: Rank) -> None:
        """If the store of a silent rank alone is late, copies can go on."""
        if rank.health is RankState.SILENT and all(rank.open[op].stored for op in rank.overdue):
            for op in rank.overdue:
                self._watch(rank, op)
            rank.overdue.clear()
            self._set(rank, RankState.HEALTHY, "")

    def statistics(self) -> tuple[RankStatistics, ...]:
        return tuple(rank.statistics() for rank in self._ranks)
