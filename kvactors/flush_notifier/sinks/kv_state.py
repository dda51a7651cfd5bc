"""The state that the batches of a publisher add up to at one number of its stream, for readers that
lack more than is kept for replay.

It is read from the ledger in steps, while deliveries go on. What the deliveries change is
corrected, so that the state is exactly that of its number: a reader that takes it and then every
batch from that number on takes no change twice and misses none.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.runs import Holding
from kvactors.flush_notifier.sinks.base import Holdings
from kvactors.flush_notifier.sinks.kv_wire import END, Dialect, Event
from kvactors.types import ALL_TIERS, KEY_BYTES, Residency, Tier

PART = 256
"""Blocks in one batch of a state."""

STEP = 128
"""Blocks read from the ledger, or corrected, between which others may run."""

KNOWN = 8
"""Bits by which `Changes` shifts the tiers that it knows."""

_encoder = msgspec.msgpack.Encoder()


class Changes:
    """What differs between the ledger's view of the sink and the stream up to a number.

    last: tasks published before that number that the ledger may not count as delivered yet: they
    hold. Every task noted later was published from that number on: what it changes was the other
    way round before.
    """

    def __init__(self, last: Sequence[FlushTask]) -> None:
        self.empty = any(
            not task.count for task in last
        )  # the last thing published was that everything is gone
        self.cleared = (
            False  # everything went later: the ledger does not have what was there at the number
        )
        self._tiers: dict[
            bytes, int
        ] = {}  # by block hash: tiers at the number, and above them which of these are known
        self._pending: deque[tuple[FlushTask, bool]] = deque((task, True) for task in last)

    def note(self, tasks: Iterable[FlushTask]) -> None:
        """These are about to be published, with the number of the state or a later one."""
        self._pending.extend((task, False) for task in tasks)

    async def settle(self) -> None:
        """Take everything noted so far into account. Nothing is noted between its end and the
        caller's next await."""
        looked = 0
        while self._pending:
            task, holds = self._pending.popleft()
            if not task.count:
                self.cleared |= not holds
                continue
            bit, resident = int(task.tier), task.residency is Residency.RESIDENT
            for start in range(0, len(task.keys), KEY_BYTES):
                key = task.keys[start : start + KEY_BYTES]
                tiers = self._tiers.get(key, 0)
                if holds or not tiers >> KNOWN & bit:
                    here = resident is holds
                    self._tiers[key] = tiers & ~bit | bit << KNOWN | (bit if here else 0)
                looked += 1
                if not looked % STEP:
                    await asyncio.sleep(0)

    def tiers(self, held: Holding) -> int:
        """The tiers of a block at the number."""
        changed = self._tiers.get(held.key)
        if changed is None:
            return held.tiers
        known = changed >> KNOWN
        return held.tiers & ~known | changed & known


class Part(NamedTuple):
    """Some events of a state, encoded one after another. size: how many."""

    size: int
    events: bytes


class State(NamedTuple):
    """number: of the first batch that is not in it. parts: AllBlocksCleared, then what is stored,
    parents before children."""

    number: int
    parts: list[Part]

    def payloads(self, most: int, dp_rank: int) -> Iterator[bytes]:
        """The state as at most `most` batches (at least one)."""
        size = -(-len(self.parts) // max(1, most))
        for start in range(0, len(self.parts), size):
            yield joined(self.parts[start : start + size], dp_rank)

    def count(self, most: int) -> int:
        """How many batches `payloads` gives."""
        size = -(-len(self.parts) // max(1, most))
        return -(-len(self.parts) // size)

    def stored(self) -> Iterator[Any]:
        """The parts without AllBlocksCleared, each as an encoded array of events."""
        for part in self.parts[1:]:
            yield msgspec.Raw(array_head(part.size) + part.events)


def joined(parts: Sequence[Part], dp_rank: int) -> bytes:
    """Parts as the payload of one batch."""
    stamp, rank = _encoder.encode(time.time()), _encoder.encode(dp_rank)
    head = array_head(3) + stamp + array_head(sum(part.size for part in parts))
    return b"".join((head, *(part.events for part in parts), rank))


def array_head(count: int) -> bytes:
    """The beginning of a msgpack array."""
    if count < 16:
        return bytes([0x90 | count])
    return (
        b"\xdc" + count.to_bytes(2, "big")
        if count < 1 << 16
        else b"\xdd" + count.to_bytes(4, "big")
    )


def encoded(events: Sequence[Event]) -> Part:
    """Events as a part."""
    return Part(len(events), b"".join(map(_encoder.encode, events)))


def stored_of(held: Holding, tiers: int, dialect: Dialect) -> Iterator[Event]:
    """One BlockStored for each of the tiers."""
    for tier in Tier:
        if tiers & tier:
            yield dialect.held(held, tier)


async def make_state(
    number: int, holdings: Holdings, changes: Changes, dialect: Dialect
) -> State | None:
    """The state at a number; None if everything was cleared while it was made."""
    parts = [encoded([dialect.cleared()])]
    if changes.empty:
        return State(number, parts)
    events: list[Event] = []
    blocks = 0
    source = iter(holdings(every=True))
    while True:
        await changes.settle()
        some = list(islice(source, STEP))
        for held in some:
            tiers = changes.tiers(held) & ALL_TIERS.value
            if tiers:
                events += stored_of(held, tiers, dialect)
                blocks += 1
        if blocks >= PART or not some:
            if events:
                parts.append(encoded(events))
            events, blocks = [], 0
        if changes.cleared:
            return None
        if not some:
            return State(number, parts)
        await asyncio.sleep(0)


class StateMaker:
    """Makes states, one at a time, and keeps the last one for further readers until `release`.

    begin: gives the number and the corrections of a new state, end: is called with these
    corrections when it is made. usable: whether the batches from a number on are still kept.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[int, Changes]],
        end: Callable[[Changes], None],
        holdings: Callable[[], Holdings],
        usable: Callable[[int], bool],
        dialect: Dialect,
    ) -> None:
        self.made = 0
        self.number = END  # of the last state, while a reader may need it
        self._begin = begin
        self._end = end
        self._holdings = holdings
        self._usable = usable
        self._dialect = dialect
        self._last: State | None = None
        self._making: asyncio.Task[State] | None = None

    async def state(self) -> State:
        """A state after which every batch is still kept. An exception of the ledger is passed
        on."""
        if self._last is not None and self._usable(self._last.number):
            return self._last
        if self._making is None or self._making.done():
            self._making = asyncio.get_running_loop().create_task(self._make())
            self._making.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # seen even if no reader waits
        return await asyncio.shield(self._making)

    async def _make(self) -> State:
        while True:
            number, changes = self._begin()
            try:
                state = await make_state(number, self._holdings(), changes, self._dialect)
            finally:
                self._end(changes)
            if state is not None:
                self._last = state
                self.made += 1
                return state

    def release(self) -> None:
        """No reader needs a state now."""
        self._last = None
        self.number = END
        if self._making is not None:
            self._making.cancel()
            self._making = None
