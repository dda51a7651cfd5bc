"""`Backend`: the contract between the storage actors and a store, and the extension point for
stores of other packages.

Arguments of the batch calls: `keys` are block hashes of 32 bytes. `views` are as many contiguous
buffers of `block_bytes` bytes, writable for reads (`GuardedBackend` refuses others). From the
storage actors they are `SlotViews`. `expired` returns whether the deadline of the batch has passed:
a store does not begin keys after it, and reports them as LATE."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from kvactors.device.arena import Arena, HostSlots
from kvactors.errors import StoreUnsupported
from kvactors.flush_notifier.messages import PathPart
from kvactors.identity import Lineage
from kvactors.storage.catalog import StoreShares
from kvactors.storage.messages import Outcome

__all__ = ["Backend", "Expired", "ReadReport", "SlotViews", "StoreStatistics", "WriteReport"]

Keys = Sequence[bytes]
Views = Sequence[memoryview]
Expired = Callable[[], bool]
"""Whether the deadline of a batch has passed: keys that were not begun by then are LATE."""


class ReadReport(NamedTuple):
    """The result of a read: one outcome a key, and the keys whose objects were corrupt or missing
    and are removed from the store."""

    outcomes: bytes
    gone: list[bytes]


class WriteReport(NamedTuple):
    """The result of a write: one outcome a key, and the keys that were evicted for it."""

    outcomes: bytes
    evicted: list[bytes]


class SlotViews(Sequence[memoryview]):
    """Slots of an arena as views, each of which is made when it is looked at: a store that moves
    slots by their numbers makes none. The arena of ranks is not in this process, and has none."""

    def __init__(self, arena: HostSlots, slots: Sequence[int]) -> None:
        self.arena: Any = arena
        self.slots = slots

    def __len__(self) -> int:
        return len(self.slots)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return SlotViews(self.arena, self.slots[which])
        return self.arena.view(self.slots[which])


class Backend(ABC):
    """A store of objects of `block_bytes` bytes, each under a 32-byte key.

    Subclass it, implement the abstract methods, and run
    `kvactors.testing.store_contract.StoreContract` on the result. One object is shared by all
    storage actors of a process, on one event loop. The constructor must not block. Results are per
    key, and errors are outcomes, never exceptions. A store that one process owns lists its keys
    (`keys`, `holds`), and indexes receive them. A store that several nodes share lists none.

    Args:
        digest: of the store's identity (model, namespace, layout, rank), 32 bytes.
        block_bytes: size of each object.

    Attributes:
        slot_trailer_bytes: bytes behind each slot of the arena that the store needs.
        removed_outside: whether objects left the store outside of batches since `take_removed` was
            called.
        clear_pending: whether a `clear` did not reach the whole store and must be repeated.
        generation: number of clears, durable in a store that outlives its process.
        stuck: whether calls still run after `close`. The arena's memory then stays mapped.
        wipes: whether `wipe` is supported.
        keeps_lineages: whether it keeps the inputs of its keys, for the paths of its blocks.
        is_complete: whether `keys` and `holds` find every object that can be read. If not, only
            `exists_many` does.
        shares: its objects by salt. None: it cannot keep quotas of salts.
        more_space: what an operator can do if it has no space, for `health`.
        counters: outcomes of batches, counted by the storage actors.
    """

    slot_trailer_bytes: int = 0
    clear_pending: bool = False
    removed_outside: bool = False
    generation: int = 0
    stuck: bool = False
    wipes: bool = False
    keeps_lineages: bool = False
    is_complete: bool = False
    shares: StoreShares | None = None
    more_space: str = ""

    def __init__(self, digest: bytes, block_bytes: int) -> None:
        self.digest = digest
        self.block_bytes = block_bytes
        self.counters = StoreCounters()

    @abstractmethod
    async def open(self) -> None:
        """Find the stored objects. Cancelled after `actors.open_timeout_s` seconds. `close` follows
        in any case.

        Raises:
            StoreError: the store cannot be used. Nothing is left open.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything. No other call is running or follows."""

    async def attach(self, arena: Arena) -> None:
        """Prepare for views of this memory. Called once, before the first batch."""

    @abstractmethod
    def probe(self, keys: Keys) -> int | None:
        """Length of the leading run of keys that can be read, which count as used now. None if
        only `ask` can find out."""

    async def ask(self, keys: Keys, expired: Expired) -> int:
        """`probe` of a store that must be queried.

        Raises:
            StoreUnavailable: it does not answer.
        """
        return self.probe(keys) or 0

    async def exists_many(self, keys: Keys, expired: Expired) -> list[bool]:
        """Whether each key can be read, for keys of several paths. By default the store is asked
        once for each run of keys that it holds.

        Raises:
            StoreUnavailable: it does not answer.
        """
        found, start = [False] * len(keys), 0
        while start < len(keys) and not expired():
            run = min(max(0, await self.ask(keys[start:], expired)), len(keys) - start)
            found[start : start + run] = [True] * run
            start += run + 1
        return found

    @abstractmethod
    async def read(self, keys: Keys, views: Views, expired: Expired) -> ReadReport:
        """Read a batch. When the call has ended, cancelled or not, no view is written any more.
        Views whose outcome is not OK have undefined contents."""

    @abstractmethod
    async def write(
        self,
        keys: Keys,
        views: Views,
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        """Write a batch, least recently used first, each object whole or not at all. Keys that are
        in the store count as used now. When the call has ended, no view is read any more.

        Args:
            lineages: one a key, or none at all. Only a store with `keeps_lineages` is given any.
            salts: numbers (see `quotas.salt_id`), likewise. Only a store with `shares` is given
                any.
        """

    @abstractmethod
    async def remove(self, keys: Keys) -> None:
        """Delete objects, which are not found from the call on. Keys that are not in the store are
        passed over, and those whose objects are being written."""

    @abstractmethod
    async def clear(self, generation: int = 0) -> None:
        """Delete every object, those that are being written included. When it returns, no process
        can read any of them, even after a kill.

        Args:
            generation: the store's `generation` becomes max(generation + 1, this).

        Raises:
            StoreError: the store cannot ensure it.
        """

    async def forget(self, salt: int) -> int:
        """Delete every object of a salt (`quotas.salt_id`), in a `LocalStore`. No write is in
        flight. When it returns, no process can read any of them, even after a kill.

        Returns:
            Objects whose salt is not known, which stay.

        Raises:
            StoreError: the store cannot ensure it.
        """
        raise StoreUnsupported("this store does not keep the salts of its objects")

    async def wipe(self, expired: Expired) -> str:
        """Overwrite the bytes of every object that has left the store (only with `wipes`), until
        `expired`. Returns why bytes may remain, empty if none do."""
        raise StoreUnsupported("this store does not overwrite objects that have left it")

    # -- the keys that this process answers for: none in a store that several nodes share

    def keys(self) -> list[bytes]:
        """The keys that this process answers for, least recently used first."""
        return []

    def key_slices(self) -> Iterator[list[bytes]]:
        """`keys` in parts. The store may change between two of them: a key that it holds all the
        time is in one."""
        return iter([self.keys()])

    def count(self) -> int:
        """Number of `keys`."""
        return len(self.keys())

    def holds(self, key: bytes) -> bool:
        """Whether a key is one of `keys`."""
        return False

    def take_removed(self) -> list[bytes]:
        """Keys removed outside of batches that have not been reported, some thousand at most. Each
        is returned once."""
        return []

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None:
        """The removal of `keys` has been reported to the indexes."""

    # -- the paths that the objects form: none without lineages

    def begin_paths(self) -> None:
        """Begin to read the paths that the objects form. An earlier reading ends."""

    async def next_paths(self, most: int) -> list[PathPart] | None:
        """The next parts of paths, with about `most` blocks in all, parents before children. None
        at the end. Changes since `begin_paths` may be missing."""
        return None

    def end_paths(self) -> None:
        """End the reading of paths."""

    # -- its condition

    def trouble(self) -> str:
        """The last failure, for the log and for health, without tokens and keys."""
        return ""

    def condition(self) -> str:
        """Why the store holds less than it should now, and the remedy, for `health`. Empty if it
        does not. Called from any thread."""
        return ""

    def statistics(self) -> StoreStatistics:
        """Sizes and counters."""
        return self.counters.statistics(self.count(), self.block_bytes)


# -- counters


class StoreStatistics(NamedTuple):
    """Sizes and counters of a store, in objects. The counters start at zero when it is opened.

    Attributes:
        objects: objects in the store, 0 if it does not tell.
        object_bytes: bytes of one object.
        reads: objects read and verified. The fields below count objects as well.
        writes: written.
        existing: to be written, and there already.
        misses: to be read, and not there.
        corrupt: refused by a checksum.
        no_space: found no space.
        unavailable: of calls that failed, or were not made during a pause.
        late: missed the deadline of their call.
        evicted: removed for others.
        breaker: worst circuit breaker of look-ups, reads and writes: closed, open, or half open
            until a trial.
        faults: calls that raised, or broke the contract otherwise.
        capacity: objects at most, 0 without a limit or if the store does not tell.
        quota_evictions: removed or not taken because their salt was above its quota.
        without_checksum: misses without a checksum, since another node of the pool has
            `storage.mooncake.payload_checksums` off.
        refused: not written because of a salt's quota, or because a batch has more than the store
            holds.
    """

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
    faults: int = 0
    capacity: int = 0
    quota_evictions: int = 0
    without_checksum: int = 0
    refused: int = 0


class StoreCounters:
    """Counts outcomes."""

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.reads = self.writes = self.evicted = self.without_checksum = 0

    def read(self, outcomes: bytes) -> None:
        """Count the outcomes of a read, one byte a key."""
        self.reads += outcomes.count(Outcome.OK)
        self._count(outcomes)

    def written(self, outcomes: bytes) -> None:
        """Count the outcomes of a write, one byte a key."""
        self.writes += outcomes.count(Outcome.OK)
        self._count(outcomes)

    def _count(self, outcomes: bytes) -> None:
        for outcome in set(outcomes):
            self.outcomes[Outcome(outcome)] += outcomes.count(outcome)

    def statistics(
        self, objects: int, object_bytes: int, capacity: int = 0, quota_evictions: int = 0
    ) -> StoreStatistics:
        """The counters, with the figures of the store that `StoreStatistics` names alike."""
        outcomes = self.outcomes
        return StoreStatistics(
            objects,
            object_bytes,
            self.reads,
            self.writes,
            outcomes[Outcome.EXISTS],
            outcomes[Outcome.MISS],
            outcomes[Outcome.CORRUPT],
            outcomes[Outcome.NO_SPACE],
            outcomes[Outcome.UNAVAILABLE],
            outcomes[Outcome.LATE],
            self.evicted,
            "closed",  # of a store behind no `GuardedBackend`
            capacity=capacity,
            quota_evictions=quota_evictions,
            without_checksum=self.without_checksum,
            refused=outcomes[Outcome.REFUSED],
        )
