"""The contract of a store. One back end object is shared by every reader and writer of a system, on one loop, and is the single
owner of what the store holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple

from kvactors.storage.breaker import Breaker
from kvactors.storage.catalog import Catalog
from kvactors.storage.messages import Outcome


class StoreStatistics(NamedTuple):
    """A moment's picture of a store. Counters since it was opened."""

    objects: int
    object_bytes: int
    reads: int
    writes: int
    existing: int
    misses: int
    corrupt: int
    no_space: int
    unavailable: int
    late: int
    evicted: int
    breaker: str


class ReadReport(NamedTuple):
    """One outcome a key, and the names whose objects turned out bad or missing: the store does not hold them any more."""

    outcomes: bytes
    gone: list[bytes]


class WriteReport(NamedTuple):
    """One outcome a key, and the names that were evicted for the batch."""

    outcomes: bytes
    evicted: list[bytes]


class Backend(ABC):
    """A store of objects of `block_bytes` bytes named by 32-byte keys, all of one `fingerprint`.

    Results are per key, never one for a batch, and errors are outcomes, never exceptions. Names change hands synchronously: `probe`
    and `take` have their effect before anything else runs on the loop. `expired()` of a batch says whether its deadline has come;
    keys not begun by then are LATE.
    """

    def __init__(self, fingerprint: bytes, block_bytes: int, capacity: int = 0) -> None:
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes
        self.catalog = Catalog(capacity)
        self.pending: set[bytes] = set()  # names in the catalog whose objects are being written
        self.breaker = Breaker()
        self.counts = dict.fromkeys(Outcome, 0)
        self.reads = self.writes = self.evicted = 0

    @abstractmethod
    async def open(self) -> None:
        """Find out what is there. Raises StoreError if the store cannot be used at all."""

    @abstractmethod
    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """Read one object into `into` (block_bytes long): OK, MISS, CORRUPT or UNAVAILABLE (then what is in
        `into` means nothing). Nothing is written there after the call has ended, cancelled or not."""

    @abstractmethod
    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """Write one object, whole or not at all: OK, NO_SPACE or UNAVAILABLE. `data` is not read after the call has ended."""

    @abstractmethod
    async def erase(self, keys: Sequence[bytes]) -> None:
        """Delete objects that the catalog has forgotten already."""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything."""

    @abstractmethod
    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Await the coroutines that `work` makes, as many at once as suits the store."""

    def keys(self) -> list[bytes]:
        """Names of all objects, least recently used first."""
        return self.catalog.keys()

    def probe(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run that can be read; it counts as used now."""
        if self.breaker.state() == "open":
            return 0
        ready = next((i for i, key in enumerate(keys) if key in self.pending), len(keys))
        return self.catalog.run(keys[:ready])

    def take(self, keys: Sequence[bytes]) -> None:
        """Forget names that are about to be read for the last time (an exclusive store): they stop counting at once."""
        self.catalog.remove(keys)

    async def read(self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]) -> ReadReport:
        """Read a batch."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)

        async def one(i: int) -> None:
            if not expired():
                outcomes[i] = await self.load(keys[i], views[i])

        await self._batch(len(keys), one, outcomes)
        corrupt = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.CORRUPT]
        missing = [key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.MISS]
        self.reads += outcomes.count(Outcome.OK)
        gone = self.catalog.remove(key for key in (*corrupt, *missing) if key not in self.pending)
        await self.erase([key for key in gone if key not in self.catalog])
        return ReadReport(bytes(outcomes), gone)

    async def write(self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Callable[[], bool]) -> WriteReport:
        """Write a batch, least recently used first. What is there already counts as used now."""
        busy = set(self.pending)
        admission = self.catalog.admit([key for key in keys if key not in busy])
        self.evicted += len(admission.evicted)
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        fresh, existing, refused = set(admission.fresh), set(admission.existing), set(admission.refused)
        self.pending |= fresh

        async def one(i: int) -> None:
            key = keys[i]
            if key in refused:
                outcomes[i] = Outcome.NO_SPACE
            elif key in existing:
                outcomes[i] = Outcome.EXISTS
            elif key in fresh and not expired():
                outcomes[i] = await self.save(key, views[i])
                if outcomes[i] == Outcome.OK and key not in self.catalog:  # evicted by another batch meanwhile
                    await self.erase([key])
                    outcomes[i] = Outcome.NO_SPACE

        try:
            await self.erase(admission.evicted)
            await self._batch(len(keys), one, outcomes)
        finally:
            self.pending -= fresh
            failed = {key for key, outcome in zip(keys, outcomes, strict=True) if outcome != Outcome.OK}
            self.catalog.remove(fresh & failed)
        self.writes += outcomes.count(Outcome.OK)
        return WriteReport(bytes(outcomes), admission.evicted)

    async def _batch(self, count: int, one: Callable[[int], Awaitable[None]], outcomes: bytearray) -> None:
        if self.breaker.closed():
            await self.each([partial(one, i) for i in range(count)])
        else:
            outcomes[:] = bytes([Outcome.UNAVAILABLE]) * count
        for outcome in outcomes:
            self.counts[Outcome(outcome)] += 1
        self.breaker.saw(outcomes.count(Outcome.UNAVAILABLE) < max(1, count))

    async def clear(self) -> None:
        """Delete every object."""
        keys = self.catalog.keys()
        self.catalog.clear()
        await self.erase(keys)

    def statistics(self) -> StoreStatistics:
        """A moment's picture."""
        c = self.counts
        return StoreStatistics(
            len(self.catalog), self.block_bytes, self.reads, self.writes, c[Outcome.EXISTS], c[Outcome.MISS], c[Outcome.CORRUPT],
            c[Outcome.NO_SPACE], c[Outcome.UNAVAILABLE], c[Outcome.LATE], self.evicted, self.breaker.state(),
        )  # fmt: skip
