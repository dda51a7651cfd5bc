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
from collections.abc import Callable
from functools import partial
from itertools import count

from kvactors.actor.clock import now
from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import uncancelled, wait_uncancelled
from kvactors.data_plane.ranks.connection import Connection, Listener
from kvactors.data_plane.ranks.entrance import Entrance, Strangers, lacking
from kvactors.data_plane.ranks.names import Joins, RankNames
from kvactors.data_plane.ranks.protocol import (
    Arrived,
    Frame,
    Identity,
    MoveDevice,
    Names,
    Pong,
    RankAnswer,
    StoreObjects,
    Welcome,
)
from kvactors.data_plane.ranks.state import (
    PAGE_LIMIT,
    Link,
    Rank,
    RankHealth,
    RankOperation,
    RankState,
    RankStatistics,
    Silence,
    Violation,
)
from kvactors.errors import RankError
from kvactors.identity import StoreIdentity
from kvactors.settings.ranks import RanksConfig, Secret

log = get_logger()

PENALTY_LEAST, PENALTY_MOST = 0.5, 30.0
"""Seconds a rank must wait after it violated the protocol before it is admitted again. Doubled each
time."""


class RankGroup:
    """All ranks of one cache.

    Attributes:
        memory_generation: the count of losses of memory.
        names: keys that the stores of all ranks hold, if there are stores.
        layers: of a block, at most as many can arrive.
        used: whether a cache relies on the ranks' memory.
    """

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
        # Called with a rank and its health before and after each change, for tests.
        self.on_health: Callable[[int, RankState, RankState], None] | None = None
        self.names: RankNames | None = None
        self.memory_generation = 0
        self.strangers = Strangers()
        self._ranks = [Rank(number) for number in range(config.count)]
        self._ops = count(1)
        self.used = self._closing = False
        self._entrance = Entrance(self, Secret(config.secret))
        self._joins = Joins()
        self._admission: asyncio.Future[None] | None = None
        self._silence = Silence(config.timeout_s, self._set)
        self._listener = listener_of(self)

    @property
    def healthy(self) -> bool:
        """Whether every rank is."""
        return not self._closing and all(rank.health is RankState.HEALTHY for rank in self._ranks)

    async def open(self) -> None:
        """Listen, and wait until every rank was admitted. Can be called again after a failure."""
        try:
            began = self._joins.progress = now()
            for rank in self._ranks:
                rank.since = began
            await self._listener.start(self.config.endpoint)
            while not self.healthy:
                left = max(began + self.config.startup_timeout_s, self._joins.deadline) - now()
                if left <= 0:
                    break
                self._admission = asyncio.get_running_loop().create_future()
                await asyncio.wait((self._admission,), timeout=left)
            if not self.healthy:
                raise RankError(lacking(self._ranks, self.config, self.strangers))
        except BaseException:
            await uncancelled(self._reset())
            raise

    async def _reset(self) -> None:
        """Close, and be as before `open`."""
        await self.close()
        self._ranks, self._joins = [Rank(rank.number) for rank in self._ranks], Joins()
        self._listener, self._closing, self._silence.closing = listener_of(self), False, False

    def abandon_pending(self) -> None:
        """Nothing will be reused any more: operations that wait for a silent or lost rank need not
        wait longer."""
        self._closing = self._silence.closing = True
        for rank in self._ranks:
            if rank.health is not RankState.HEALTHY:
                rank.settle()

    async def close(self) -> None:
        """End every operation and close every connection."""
        self._closing = self._silence.closing = True
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
        partial: bool = False,
        only: int | None = None,
    ) -> list[RankAnswer | None]:
        """Send the message that `build` makes for an operation number to every rank. Returns an
        answer for each, None for a rank without one. While a rank is disconnected or silent no
        message is sent, and no rank has an answer. A cancelled call still waits until nothing is in
        flight.

        arrived: called with the layers that all ranks have, whenever there are more. outcomes: how
        many an answer must have. worst: the greatest value of an outcome. A rank with other answers
        is disconnected. partial: ask the healthy ranks even if others are not. only: ask this rank.
        """
        if not (self.healthy or (partial and not self._closing)):
            return [None] * len(self._ranks)
        op, loop = next(self._ops), asyncio.get_running_loop()
        message = build(op)
        progress = layer_progress(len(self._ranks), arrived)
        answers: list[asyncio.Future[RankAnswer | None]] = []
        for rank in self._ranks:
            operation = RankOperation(
                loop.create_future(),
                progress(rank.number),
                outcomes,
                worst,
                stored=isinstance(message, StoreObjects | MoveDevice),
            )
            answers.append(operation.answer)
            if (
                rank.health is not RankState.HEALTHY
                or rank.link is None
                or only not in (None, rank.number)
            ):
                operation.over(None)
                continue
            operation.timer = loop.call_later(self.config.timeout_s, self._silence.late, rank, op)
            rank.open[op] = operation
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
            identity = await self._entrance.admit(connection, self._claim)
            if identity is not None:
                await self._serve(self._ranks[identity.rank], Link(connection, identity))
        finally:
            self._entrance.leave(connection)
            connection.close()

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
        joining = asyncio.get_running_loop().create_task(self._join(rank, link))
        try:
            reason = await self._receive(rank, link)
        except Violation as violation:
            reason = f"protocol violation: {violation}"
            rank.penalize(now(), PENALTY_LEAST, PENALTY_MOST)
            log.error("protocol violation of a rank", rank=rank.number, reason=str(violation))
        finally:
            self._lost(rank, link, reason)
            joining.cancel()
            await asyncio.wait((joining,))

    async def _join(self, rank: Rank, link: Link) -> None:
        """Receive the keys in a rank's store and admit it."""
        try:
            async with self._joins.turn():
                if self.names is None or await self._joins.receive_keys(self.names, link):
                    self._admit(rank, link)
                else:
                    log.warning(
                        "rank did not send its names", rank=rank.number, received=link.received
                    )
                    self._lost(rank, link, f"no page of names in {PAGE_LIMIT:g} s")
        except Exception as error:
            log.error("rank cannot join", rank=rank.number, error=repr(error))
            self._lost(rank, link, f"cannot join: {error!r}")

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
                self._silence.answered(rank)
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

    def disconnect(self, number: int) -> None:
        """Close the connection to a rank. The rank connects again."""
        rank = self._ranks[number]
        if rank.link is not None:
            self._lost(rank, rank.link, "connection closed by the leader")

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
        if self.on_health is not None:
            self.on_health(rank.number, rank.health, health)
        rank.health, rank.reason, rank.since = health, reason, now()
        self.changed(rank.number, health)
        if self._admission is not None and not self._admission.done():
            self._admission.set_result(None)

    def statistics(self) -> tuple[RankStatistics, ...]:
        """The state of every rank at this moment."""
        return tuple(rank.statistics() for rank in self._ranks)

    def health(self) -> tuple[RankHealth, ...]:
        """For every rank: its state, why, and since when."""
        return tuple(rank.describe() for rank in self._ranks)


def listener_of(group: RankGroup) -> Listener:
    """A listener that refuses and counts connections of other users."""
    refused = group.strangers.refused
    return Listener(group.accept, lambda source, why: refused(source, "another user", why))


def layer_progress(
    ranks: int, arrived: Callable[[int], None] | None
) -> Callable[[int], Callable[[int], None] | None]:
    """Combine the layers that arrive on each rank: `arrived` is called with the number that all
    ranks have, each time it grows. Returns the function to call with a rank's layers, by rank."""
    if arrived is None:
        return lambda _rank: None
    layers = [0] * ranks

    def note(rank: int, count: int) -> None:
        before = min(layers)
        layers[rank] = max(layers[rank], count)
        if min(layers) > before:
            arrived(min(layers))

    return lambda rank: partial(note, rank)
