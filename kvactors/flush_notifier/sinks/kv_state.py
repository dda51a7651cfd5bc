"""The state of a stream of events at one sequence number, for readers that miss more than is kept
for replay.

It is read from the ledger in steps, while deliveries continue. Their changes are corrected, so that
the state is exactly that of its number: a reader that applies it and then every batch from that
number on applies each change once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import SnapshotSource
from kvactors.flush_notifier.sinks.kv_encoder import KvEventEncoder
from kvactors.flush_notifier.sinks.kv_wire import END
from kvactors.types import ALL_TIERS, HASH_BYTES, Residency, Tier

PART = 256
"""Blocks in one batch of a state."""

STEP = 128
"""Blocks read from the ledger, or corrected, in one step."""

KNOWN = 8
"""Bits by which `StreamChanges` shifts the known tiers."""

_encoder = msgspec.msgpack.Encoder()


class StreamChanges:
    """How the ledger's view of the sink differs from the stream up to a number.

    Args:
        last: tasks published before that number that the ledger may not have in the view yet.

    Attributes:
        empty: the last task before the number removed everything.
        cleared: a later task removed everything, so the ledger no longer has the blocks of the
            number.
    """

    def __init__(self, last: Sequence[FlushTask]) -> None:
        self.empty = any(not task.count for task in last)
        self.cleared = False
        # by block hash: tiers at the number, and above them for which tiers that is known
        self._tiers: dict[bytes, int] = {}
        self._pending: deque[tuple[FlushTask, bool]] = deque((task, True) for task in last)

    def note(self, tasks: Iterable[FlushTask]) -> None:
        """Note tasks that are about to be published, with the state's number or a later one. Before
        that number each of their changes was the other way round."""
        self._pending.extend((task, False) for task in tasks)

    async def settle(self) -> None:
        """Apply everything noted so far. Nothing is noted between the return and the caller's next
        await."""
        looked = 0
        while self._pending:
            task, holds = self._pending.popleft()
            if not task.count:
                self.cleared |= not holds
                continue
            bit, resident = int(task.tier), task.residency is Residency.RESIDENT
            for start in range(0, len(task.hashes), HASH_BYTES):
                block_hash = task.hashes[start : start + HASH_BYTES]
                tiers = self._tiers.get(block_hash, 0)
                if holds or not tiers >> KNOWN & bit:
                    here = resident is holds
                    self._tiers[block_hash] = tiers & ~bit | bit << KNOWN | (bit if here else 0)
                looked += 1
                if not looked % STEP:
                    await asyncio.sleep(0)

    def tiers(self, held: HeldBlock) -> int:
        """The tiers of a block at the number."""
        changed = self._tiers.get(held.hash)
        if changed is None:
            return held.tiers
        known = changed >> KNOWN
        return held.tiers & ~known | changed & known


class Part(NamedTuple):
    """Consecutive events of a state, encoded.

    Attributes:
        size: how many.
    """

    size: int
    events: bytes


class StreamState(NamedTuple):
    """A state as encoded events.

    Attributes:
        number: sequence number of the first batch that is not part of it.
        parts: AllBlocksCleared, then the blocks, parents before children.
    """

    number: int
    parts: list[Part]

    def payloads(self, most: int, dp_rank: int) -> Iterator[bytes]:
        """The state as at most `most` batches (at least one)."""
        size = -(-len(self.parts) // max(1, most))
        for start in range(0, len(self.parts), size):
            yield joined(self.parts[start : start + size], dp_rank)

    def count(self, most: int) -> int:
        """Number of batches that `payloads` yields."""
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


def encoded(events: Sequence[bytes]) -> Part:
    """Events as a part."""
    return Part(len(events), b"".join(events))


def stored_of(held: HeldBlock, tiers: int, encoder: KvEventEncoder) -> Iterator[bytes]:
    """One BlockStored for each of the tiers."""
    for tier in Tier:
        if tiers & tier:
            yield encoder.held(held, tier)


async def make_state(
    number: int, source: SnapshotSource, changes: StreamChanges, encoder: KvEventEncoder
) -> StreamState | None:
    """Make the state at a number. None if everything was removed before it was complete."""
    parts = [encoded([encoder.cleared])]
    if changes.empty:
        return StreamState(number, parts)
    events: list[bytes] = []
    blocks = 0
    held_blocks = iter(source(every=True))
    while True:
        await changes.settle()
        some = list(islice(held_blocks, STEP))
        for held in some:
            tiers = changes.tiers(held) & ALL_TIERS.value
            if tiers:
                events += stored_of(held, tiers, encoder)
                blocks += 1
        if blocks >= PART or not some:
            if events:
                parts.append(encoded(events))
            events, blocks = [], 0
        if changes.cleared:
            return None
        if not some:
            return StreamState(number, parts)
        await asyncio.sleep(0)


class StateMaker:
    """Makes states one at a time, and keeps the last one for further readers until `release`.

    Args:
        begin: gives the number of a new state and the corrections for it.
        end: called with these corrections when the state is made.
        source: gives the source of the view.
        usable: whether the batches from a number on are still kept.
        encoder: of the events.

    Attributes:
        made: states made.
        number: of the last state, END if no reader needs it.
    """

    def __init__(
        self,
        begin: Callable[[], tuple[int, StreamChanges]],
        end: Callable[[StreamChanges], None],
        source: Callable[[], SnapshotSource],
        usable: Callable[[int], bool],
        encoder: KvEventEncoder,
    ) -> None:
        self.made = 0
        self.number = END
        self._begin = begin
        self._end = end
        self._source = source
        self._usable = usable
        self._encoder = encoder
        self._last: StreamState | None = None
        self._making: asyncio.Task[StreamState] | None = None

    async def state(self) -> StreamState:
        """A state after which every batch is still kept. Errors of the ledger pass."""
        if self._last is not None and self._usable(self._last.number):
            return self._last
        if self._making is None or self._making.done():
            self._making = asyncio.get_running_loop().create_task(self._make())
            # retrieved here even if no reader waits
            self._making.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._making)

    async def _make(self) -> StreamState:
        while True:
            number, changes = self._begin()
            try:
                state = await make_state(number, self._source(), changes, self._encoder)
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
