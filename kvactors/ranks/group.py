"""The leader's side of its ranks: every operation goes to all of them at once, and its answers are gathered, with no barrier anywhere.

A rank that does not answer in time is silent: from then on nothing is sent to any rank, and every operation fails at once, until it
has answered all it owes. What it was asked stays open meanwhile, and with it the slots and device blocks concerned: whoever stopped in
the middle of a copy may go on with it at any moment. A rank whose connection is lost may have lost its memory, so nothing that was
cached before counts any more; what it was asked is over when it is back (it finishes that before it says hello).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from enum import Enum
from itertools import count
from typing import NamedTuple

import anyio
import structlog

from kvactors.actor.uncancelled import to_the_end
from kvactors.config import RanksConfig
from kvactors.errors import RankError
from kvactors.ranks.protocol import VERSION, Answer, Arrived, Frame, Hello, Refused, Welcome
from kvactors.ranks.wire import Wire, listen
from kvactors.units import split_keys

log = structlog.get_logger()

HELLO_LIMIT = 5.0
"""Seconds whoever connects may take to say who it is."""


class Health(Enum):
    """How a rank is."""

    AWAY = "away"
    HEALTHY = "healthy"
    SILENT = "silent"


class RankStatistics(NamedTuple):
    """A moment's picture of one rank. losses, silences: how often its connection was lost, and an answer late."""

    rank: int
    health: str
    operations: int
    in_flight: int
    losses: int
    silences: int


class _Operation:
    """What one rank owes an answer to. arrived: told of layers."""

    __slots__ = ("answer", "arrived", "timer")

    def __init__(self, answer: asyncio.Future[Answer | None], arrived: Callable[[int], None] | None) -> None:
        self.answer = answer
        self.arrived = arrived
        self.timer: asyncio.TimerHandle | None = None

    def over(self, answer: Answer | None) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.answer.done():
            self.answer.set_result(answer)


class _Rank:
    def __init__(self, number: int) -> None:
        self.number = number
        self.wire: Wire | None = None
        self.health = Health.AWAY
        self.open: dict[int, _Operation] = {}
        self.overdue: set[int] = set()
        self.operations = self.losses = self.silences = 0

    def settle(self) -> None:
        """Whatever it was asked is over, and did not succeed."""
        operations, self.open = self.open, {}
        self.overdue.clear()
        for operation in operations.values():
            operation.over(None)


class RankGroup:
    """All ranks of one cache. fingerprint: of the layout. blocks, slots: what every rank must have.

    era: how often memory may have been lost. changed: called with a rank's number and health whenever that changes. stored: called with a
    rank's number and the names in its store when it is admitted.
    """

    def __init__(self, config: RanksConfig, fingerprint: bytes, blocks: int, slots: int) -> None:
        self.config = config
        self.fingerprint = fingerprint
        self.blocks = blocks
        self.slots = slots
        self.changed: Callable[[int, Health], None] = lambda _rank, _health: None
        self.stored: Callable[[int, set[bytes]], None] = lambda _rank, _keys: None
        self.era = 0
        self._ranks = [_Rank(number) for number in range(config.count)]
        self._ops = count(1)
        self._closing = self.used = False  # used: somebody relies on what the ranks hold
        self._refusals: list[str] = []
        self._admission: asyncio.Future[None] | None = None
        self._stack = AsyncExitStack()

    @property
    def healthy(self) -> bool:
        """Whether every rank is."""
        return not self._closing and all(rank.health is Health.HEALTHY for rank in self._ranks)

    async def open(self) -> None:
        """Listen, and wait until every rank was admitted. RankError after `ranks.start` seconds, or if nobody can listen there."""
        try:
            self._stack.push_async_callback(await listen(self.config.endpoint, self.meet))
            with anyio.move_on_after(self.config.start):
                while not self.healthy:
                    self._admission = asyncio.get_running_loop().create_future()
                    await self._admission
            if not self.healthy:
                lacking = [rank.number for rank in self._ranks if rank.health is not Health.HEALTHY]
                said = f" ({'; '.join(self._refusals)})" if self._refusals else ""
                raise RankError(f"ranks {lacking} of {self.config.count} did not come to {self.config.endpoint} in time{said}")
        except BaseException:
            await self.close()
            raise

    def release(self) -> None:
        """Nothing will be reused any more: operations that wait for a silent or lost rank need not wait longer."""
        self._closing = True
        for rank in self._ranks:
            if rank.health is not Health.HEALTHY:
                rank.settle()

    async def close(self) -> None:
        """Hang up."""
        self._closing = True
        for rank in self._ranks:
            rank.settle()
            if rank.wire is not None:
                rank.wire.close()
        await self._stack.aclose()

    # -- operations

    async def scatter(self, build: Callable[[int], Frame], arrived: Callable[[int], None] | None = None) -> list[Answer | None]:
        """Send the message that `build` makes for an operation number to every rank; an answer each, None for a rank that has none to give.
        While a rank is away or silent, nothing is sent, and nobody has one. Cancelled, it still waits until nothing is under way.

        arrived: called with the layers that all ranks have, whenever these become more.
        """
        if not self.healthy:
            return [None] * len(self._ranks)
        op, loop = next(self._ops), asyncio.get_running_loop()
        message = build(op)
        layers = [0] * len(self._ranks)

        def progress(rank: int) -> Callable[[int], None]:
            def note(count: int) -> None:
                before = min(layers)
                layers[rank] = max(layers[rank], count)
                if arrived is not None and min(layers) > before:
                    arrived(min(layers))

            return note

        answers: list[asyncio.Future[Answer | None]] = []
        for rank in self._ranks:
            operation = _Operation(loop.create_future(), progress(rank.number) if arrived else None)
            operation.timer = loop.call_later(self.config.timeout, self._silent, rank, op)
            rank.open[op] = operation
            rank.operations += 1
            answers.append(operation.answer)
            assert rank.wire is not None
            rank.wire.send(message)
        await to_the_end(asyncio.gather(*answers))
        return [answer.result() for answer in answers]

    def _silent(self, rank: _Rank, op: int) -> None:
        """An answer is late."""
        if self._closing:
            rank.settle()
        elif op in rank.open:
            rank.overdue.add(op)
            if rank.health is Health.HEALTHY:
                rank.silences += 1
                self._set(rank, Health.SILENT)

    # -- connections

    async def meet(self, wire: Wire) -> None:
        """Admit whoever is at the other end, if it is a rank of ours, and hear it until the connection is lost."""
        try:
            hello = None
            with anyio.move_on_after(HELLO_LIMIT):
                hello = await wire.receive()
            if self._closing or not isinstance(hello, Hello):
                return
            reason = self._misfit(hello)
            if reason:
                self._refusals = [*self._refusals[-2:], reason]
                log.error("a rank was refused", reason=reason)
                wire.send(Refused(reason))
                with anyio.move_on_after(HELLO_LIMIT):
                    await wire.receive()  # it hangs up when it has read this
                return
            rank = self._ranks[hello.rank]
            if rank.wire is not None:  # the old connection is not known to be lost yet
                self._lost(rank, rank.wire)
            self._admit(rank, wire, hello)
            try:
                await self._hear(rank, wire)
            finally:
                self._lost(rank, wire)
        finally:
            wire.close()

    def _misfit(self, hello: Hello) -> str:
        """Why a rank cannot be one of these; empty if it can."""
        wanted = (VERSION, self.config.count, self.fingerprint, self.blocks, self.slots)
        found = (hello.version, hello.ranks, hello.fingerprint, hello.blocks, hello.slots)
        names = ("protocol version", "rank count", "layout", "device blocks", "host slots")
        for name, ours, theirs in zip(names, wanted, found, strict=True):
            if ours != theirs:
                shown = "another one" if isinstance(theirs, bytes) else f"{theirs}, not {ours!r}"
                return f"rank {hello.rank}'s {name}: {shown}"
        if not 0 <= hello.rank < self.config.count:
            return f"there is no rank {hello.rank} of {self.config.count}"
        return "names of another length" if len(hello.keys) % 32 else ""

    def _admit(self, rank: _Rank, wire: Wire, hello: Hello) -> None:
        rank.settle()  # it says hello when everything from before is over
        rank.wire = wire
        if self.used:  # it may have begun anew more than once meanwhile, unseen
            self.era += 1
            self.changed(rank.number, Health.AWAY)
        self.stored(rank.number, set(split_keys(hello.keys)))
        wire.send(Welcome())
        self._set(rank, Health.HEALTHY)
        log.info("rank admitted", rank=rank.number)

    async def _hear(self, rank: _Rank, wire: Wire) -> None:
        while (message := await wire.receive()) is not None:
            if isinstance(message, Arrived):
                operation = rank.open.get(message.op)
                if operation is not None and operation.arrived is not None:
                    operation.arrived(message.layers)
            elif isinstance(message, Answer):
                operation = rank.open.pop(message.op, None)
                if operation is not None:
                    operation.over(message)
                rank.overdue.discard(message.op)
                if rank.health is Health.SILENT and not rank.overdue:
                    self._set(rank, Health.HEALTHY)
            else:
                log.error("a rank said what no rank says", rank=rank.number, message=type(message).__name__)
                return

    def hang_up(self, number: int) -> None:
        """End the connection to a rank; it will come again."""
        wire = self._ranks[number].wire
        if wire is not None:
            self._lost(self._ranks[number], wire)

    def _lost(self, rank: _Rank, wire: Wire) -> None:
        if rank.wire is not wire:
            return
        wire.close()
        rank.wire = None
        if self._closing:
            rank.settle()
            return
        rank.losses += 1
        self.era += 1
        self._set(rank, Health.AWAY)
        log.warning("rank lost", rank=rank.number, in_flight=len(rank.open))

    def _set(self, rank: _Rank, health: Health) -> None:
        rank.health = health
        self.changed(rank.number, health)
        if self._admission is not None and not self._admission.done():
            self._admission.set_result(None)

    def statistics(self) -> tuple[RankStatistics, ...]:
        """A moment's picture of every rank."""
        return tuple(
            RankStatistics(r.number, r.health.value, r.operations, len(r.open), r.losses, r.silences) for r in self._ranks
        )
