"""The ground of the oracle: one open cache, and the checks that it agrees with the model."""

from __future__ import annotations

import gc
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from kvactors import (
    ActorFailed,
    CacheAsleep,
    DeadlineExceeded,
    DeviceError,
    KVActorsError,
    KVCache,
    LeaseEnded,
    LeasesOpen,
    NoRoom,
    NotReady,
    Paused,
)
from kvactors.cpu_evictor.memory import NOT_FETCHED
from kvactors.errors import SleepUnsupported, StoreUnsupported, TokensCommitted
from kvactors.testing.sim import problems_at_rest
from tests.load.client import compare_clears
from tests.load.ground import Content, Ground, Part, Row

from .draw import MODEL, Draw
from .history import History
from .model import DIGEST, Memory, Scope, digests
from .record import Record

VERIFIED = {"window": "blocks of windows verified", "state": "states verified"}
"""Counts of `Record.seen`, by the kind of a group of layers."""

REST = 60.0
"""Seconds within which a cache without work must be idle. Only a hang takes as long."""


class Ticket:
    """The admission of a request.

    Attributes:
        number: of the request, for the history.
        until: the last clear of which its hits must be younger.
        scope: of its weights, salt and adapter, from its grant on.
    """

    scope: Scope

    def __init__(self, history: History) -> None:
        self.number = history.request()
        self.until = history.snapshot()


class World(Ground):
    """No part of the cache fails here, so every error needs a reason, and every pin holds."""

    name_bytes = DIGEST
    one_order = True

    def __init__(self, cache: KVCache, drawn: Draw, history: History, record: Record) -> None:
        super().__init__(cache, drawn.mix, record.seen)
        self.drawn = drawn
        self.history = history
        self.record = record
        self.keeps_quotas, self.threaded = drawn.keeps_quotas, drawn.threads > 0
        self._memories: dict[int, tuple[Any, Memory]] = {}

    @property
    def memory(self) -> Memory:
        """The device memory of the layers of `[layout]`."""
        return self._memory_of(0, self.cache)

    def _memory_of(self, number: int, cache: KVCache) -> Memory:
        """The device memory of a group of layers. After a sleep it is another."""
        device, found = cache.device, self._memories.get(number)
        if found is None or found[0] is not device:
            layers = range(cache.config.layout.num_layers)
            roles = [role.name for role in device.layout.roles(0)]
            # One assignment: clients in threads read it.
            found = self._memories[number] = device, Memory(device, layers, roles)
        return found[1]

    # -- see `Ground`

    def fail(self, what: str) -> None:
        self.record.fail(f"seed {self.drawn.seed} ({self.drawn.store}): {what}")

    def judge(self, what: str, error: KVActorsError, row: Row | None = None) -> None:
        unsupported = isinstance(error, StoreUnsupported | SleepUnsupported)
        if unsupported and self.drawn.store == "attention_store":
            return
        if isinstance(error, CacheAsleep) and self.mix.orders.get("sleep"):
            return
        if isinstance(error, NoRoom | DeadlineExceeded | Paused | LeasesOpen):
            return
        if isinstance(error, LeaseEnded) and row is not None and row.cut:
            return
        # of a request that waited for other blocks while the weights or the adapter changed
        if isinstance(error, LeaseEnded) and row is not None and what.startswith("wait_"):
            roots = self.cache.system.roots
            if self.cache.groups and row.lease._path.root != roots.root(row.lease._message.scope):
                self.seen["requests that waited over a change of weights"] += 1
                return
        # of the event of a step, see `Call`; of a block that a fork shares
        if isinstance(error, DeviceError | TokensCommitted) and what in ("step", "truncate"):
            return
        # of a state that is not computed up to its snapshot
        kinds = {group.kind for group in self.cache.config.cache.groups}
        if isinstance(error, NotReady) and what == "fork" and "state" in kinds:
            return
        last = self.cache.statistics().supervisor if isinstance(error, ActorFailed) else ""
        self.fail(f"{what} raised {error!r} {last}")

    async def wrong(self, row: Row, what: str) -> None:
        self.record.wrong += 1
        self.fail(f"{what} hold other bytes")

    def asked(self) -> Ticket:
        self.record.requests += 1
        return Ticket(self.history)

    def granted(self, row: Row) -> None:
        """The weights are those of the admission, in the step in which the grant arrives."""
        ticket: Ticket = row.ticket
        self.scoped(row)
        ticket.until = max(ticket.until, self.history.settled)  # also of a request in several turns

    def scoped(self, row: Row) -> None:
        """A request was granted its lease, by weights that do not change. A grant may arrive in a
        thread long after it was given."""
        prompt = row.prompt
        row.ticket.scope = Scope(MODEL, self.cache.namespace, prompt.lora, prompt.salt)

    def over(self, ticket: Ticket) -> None:
        self.history.end(ticket.number)

    def names(self, row: Row, content: Content) -> Sequence[bytes]:
        return digests(self.cache.block_size, row.ticket.scope, *content)

    async def write(self, row: Row, start: int, names: Sequence[bytes]) -> None:
        stamp = self.history.stamp(row.ticket.number)
        for memory, has, blocks in self._held(row, start, len(names)):
            memory.write(blocks, [names[at] for at in has], stamp)

    def _held(
        self, row: Row, start: int, count: int
    ) -> Iterator[tuple[Memory, list[int], list[int]]]:
        """For each group of layers: its memory, the positions from `start` on for which a request
        has blocks in it, and these blocks. Of a state only the last position counts."""
        caches, tables = [self.cache, *self.cache.groups.values()], row.lease.block_tables
        kinds = ["full", *(group.kind for group in self.cache.config.cache.groups)]
        for number, (cache, table) in enumerate(zip(caches, tables, strict=True)):
            first = count - 1 if kinds[number] == "state" else 0
            has = [at for at in range(first, count) if table[start + at] >= 0]
            if kinds[number] == "state" and not has:
                self.fail(f"no block has the state after block {start + count - 1}")
            yield self._memory_of(number, cache), has, [table[start + at] for at in has]

    async def differing(
        self, row: Row, start: int, names: Sequence[bytes], *, hits: bool = False
    ) -> Sequence[int]:
        wrong, size = list[int](), self.cache.block_size
        groups = self.cache.config.cache.groups
        spans = [-(-(group.window - 1) // size) for group in groups]  # of a state see `_held`
        found = self._held(row, start, len(names))
        whats = ["", *(VERIFIED[group.kind] for group in groups)]
        for (memory, has, blocks), span, what in zip(
            found, (len(names), *spans), whats, strict=True
        ):
            if hits and not {*range(max(0, len(names) - span), len(names))} <= {*has}:
                self.fail(f"a hit of {len(names)} blocks has {has} of a group of layers")
            if what:
                self.seen[what] += len(has)
                self.seen[f"{what} of hits"] += len(has) * hits
            expected = [names[at] for at in has]
            wrong += self.read(blocks, expected, row.ticket, hits=hits, memory=memory)
        return wrong

    async def differing_layer(self, row: Row, layer: int, names: Sequence[bytes]) -> Sequence[int]:
        blocks = row.lease.block_table[: len(names)]
        return self.read(blocks, names, row.ticket, hits=True, layers=[layer])

    def read(
        self,
        blocks: Sequence[int],
        names: Sequence[bytes],
        ticket: Ticket,
        *,
        hits: bool,
        layers: Sequence[int] | None = None,
        memory: Memory | None = None,
    ) -> list[int]:
        """Positions of blocks that do not hold their digests. A hit is not older than a clear that
        returned before it was asked for."""
        found = (memory or self.memory).read(blocks, names, layers)
        self.record.verified += len(found)
        for stamp in found if hits else ():
            if stamp is not None and self.history.stale(stamp, ticket.until, ticket.scope):
                self.record.wrong += 1
                self.fail("a hit was computed before a clear")
        return [position for position, stamp in enumerate(found) if stamp is None]

    @asynccontextmanager
    async def clearing(self, part: Part, *, storage: bool) -> AsyncIterator[None]:
        """From the clear's return on no block of the part computed before may be hit, unless a
        store kept it: in a later process those of an adapter."""
        kept = self.drawn.store == "file" if "lora" in part else self.drawn.store != "none"
        complete, open_at = storage or not kept, self.history.open_now()
        number = self.history.clear() if complete else 0
        with self.pins.ending(part):
            yield
        if complete:
            self.history.cleared(number, open_at, part)
            await self.history.settle()

    # -- at rest

    async def rest(self, rng: random.Random) -> None:
        """Nothing is left over, invariants hold, sinks agree."""
        cache, record = self.cache, self.record
        gc.collect()  # forgotten leases that an exception's traceback still referred to
        try:
            await cache.wake(deadline=30.0)  # a client may have been cancelled in its wake
            await cache.resume(deadline=30.0)
            problems = await problems_at_rest(cache, REST)
            for group in cache.groups.values():
                problems += await problems_at_rest(group, REST)
            self.pins.check()
            await compare_clears(self, rng)
            problems += await problems_at_rest(cache, REST)
        except KVActorsError as error:
            problems = [f"not idle: {error!r}"]
        for problem in problems:
            self.fail(f"at rest: {problem}")
        record.finished += self.finished
        statistics = cache.statistics()
        self.seen["pins refused"] += statistics.prefix.pins_refused
        self.seen["pins expired"] += statistics.prefix.pins_expired
        for group in statistics.groups.values():
            self.seen["hits of groups host"] += group.host_hits
            self.seen["hits of groups storage"] += group.storage_hits
        for name in NOT_FETCHED:
            self.seen[name] += getattr(statistics.host, name)
        if statistics.host.not_fetched_no_slot:
            self.fail(f"stored blocks found no slot: {statistics.host}")
        if statistics.supervisor.restarts:
            record.restarts += statistics.supervisor.restarts
            self.fail(f"actors restarted: {statistics.supervisor}")
