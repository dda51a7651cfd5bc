"""The contract of a store, as readers and writers see it. One back end object is shared by every
reader and writer of a system, on one loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import PathPart
from kvactors.lineage import Lineage
from kvactors.storage.breaker import Breaker
from kvactors.storage.messages import Outcome

Expired = Callable[[], bool]
"""Whether a batch's deadline has come: keys not begun by then are LATE."""


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
    faults: int = 0  # calls that raised, or answered what the contract does not allow


class ReadReport(NamedTuple):
    """One outcome a key, and the names whose objects turned out bad or missing: the store does not
    hold them any more."""

    outcomes: bytes
    gone: list[bytes]


class WriteReport(NamedTuple):
    """One outcome a key, and the names that were evicted for the batch."""

    outcomes: bytes
    evicted: list[bytes]


class Backend(ABC):
    """A store of objects of `block_bytes` bytes named by 32-byte keys, all of one `fingerprint`.
    The constructor runs on the loop and must not block.

    Results are per key, never one for a batch, and errors are outcomes, never exceptions. A store
    that this process owns alone says what it holds (`keys`, `holds`), and that is reported to
    indexes; a pool shared with other nodes holds nothing in this sense. exclusive: whether `take`
    has a meaning here.
    """

    exclusive: bool = False
    trailer: int = 0
    """Bytes behind each block of the arena that it wants for itself."""

    uncleared: bool = False
    """Whether a `clear` did not reach all of it, and is to be repeated."""

    generation: int = 0
    """How often it was cleared; a store that survives its process keeps this durably."""

    stuck: bool = False
    """Whether calls of it have not ended although it was closed: the arena's memory must stay
    mapped."""

    keeps_lineages: bool = False
    """Whether it keeps, beside objects, what their keys are made of, so that their paths can be
    announced when it is opened again."""

    def __init__(self, fingerprint: bytes, block_bytes: int) -> None:
        self.fingerprint = fingerprint
        self.block_bytes = block_bytes
        self.breaker = Breaker(store=type(self).__name__)
        self.counts = dict.fromkeys(Outcome, 0)
        self.reads = self.writes = self.evicted = 0

    @abstractmethod
    async def open(self) -> None:
        """Find out what is there. Raises StoreError if the store cannot be used at all; then
        nothing is left half-open. It is cancelled after `actors.start` seconds. `close` follows in
        any case."""

    @property
    def era(self) -> int:
        """How often the arena's memory may have been lost (if it is elsewhere); batches of an
        earlier era are not carried out."""
        return 0

    async def attach(self, arena: Arena) -> None:
        """The memory that views will be of, before the first of them comes."""

    @abstractmethod
    def probe(self, keys: Sequence[bytes]) -> int | None:
        """Length of the leading run that can be read; it counts as used now. None if only `ask` can
        tell."""

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """The same from a store that must be asked; 0 if it does not answer."""
        return self.probe(keys) or 0

    def take(self, keys: Sequence[bytes]) -> None:
        """Forget names that are about to be read for the last time (an exclusive store): they stop
        counting at once."""

    @abstractmethod
    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """Read a batch. Nothing is written into a view after the call has ended, cancelled or not;
        a view whose outcome is not OK holds nothing of meaning."""

    @abstractmethod
    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """Write a batch, least recently used first, each object whole or not at all. What is there
        already counts as used now. No view is read after the call has ended."""

    async def read_slots(
        self, keys: Sequence[bytes], arena: Arena, slots: Sequence[int], expired: Expired
    ) -> ReadReport:
        """`read` into the arena's slots."""
        return await self.read(keys, [arena.view(slot) for slot in slots], expired)

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Arena,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
    ) -> WriteReport:
        """`write` from the arena's slots. lineages: one for each key, or none; given only to a back
        end that keeps them."""
        return await self.write(keys, [arena.view(slot) for slot in slots], expired)

    @abstractmethod
    async def remove(self, keys: Sequence[bytes]) -> None:
        """Delete objects; those that are not there are passed over."""

    @abstractmethod
    async def clear(self, generation: int = 0) -> None:
        """Delete every object of this fingerprint: when this returns none can be read again, by
        this process or a later one, killed at any moment. What is being written meanwhile does not
        stay either. `generation` becomes max(generation + 1, the one given).

        Raises StoreError if that cannot be made sure of.
        """

    def trouble(self) -> str:
        """What failed last, for the log; no tokens and no keys."""
        return ""

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything; every call has ended."""

    def names(self) -> Iterator[bytes]:
        """The same names as `keys`, one by one and in any order; RuntimeError if the store changes
        before the last one."""
        return iter(self.keys())

    def count(self) -> int:
        """How many names `keys` has."""
        return len(self.keys())

    def keys(self) -> list[bytes]:
        """Names this process alone is answerable for, least recently used first."""
        return []

    def holds(self, key: bytes) -> bool:
        """Whether a name is among them."""
        return False

    def lost(self) -> list[bytes]:
        """Keys removed that have not been reported yet, some thousand at most: each is returned
        once. Empty when there are none left."""
        return []

    def begin_paths(self) -> None:
        """Begin (anew) to read which paths its objects form; an earlier reading ends. For a back
        end with `keeps_lineages`."""

    async def next_paths(self, most: int) -> list[PathPart] | None:
        """The next parts of paths, with about `most` blocks in all or with none yet, a parent
        before its children where both are there; None at the end. What was written or removed since
        the beginning may or may not be among them."""
        return None

    def end_paths(self) -> None:
        """No more parts are wanted."""

    def told(self, keys: Iterable[bytes]) -> None:
        """Whoever should know has been told that these are gone."""

    def saw(self, outcomes: bytes) -> None:
        """Count what became of a batch, and let the circuit breaker know."""
        for outcome in outcomes:
            self.counts[Outcome(outcome)] += 1
        self.breaker.saw(
            outcomes.count(Outcome.UNAVAILABLE) < max(1, len(outcomes)), self.trouble()
        )

    def statistics(self) -> StoreStatistics:
        """A moment's picture."""
        c = self.counts
        return StoreStatistics(
            self.count(),
            self.block_bytes,
            self.reads,
            self.writes,
            c[Outcome.EXISTS],
            c[Outcome.MISS],
            c[Outcome.CORRUPT],
            c[Outcome.NO_SPACE],
            c[Outcome.UNAVAILABLE],
            c[Outcome.LATE],
            self.evicted,
            self.breaker.state(),
        )
