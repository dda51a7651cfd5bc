"""Results of a store's batches, counted by outcome."""

from __future__ import annotations

from typing import NamedTuple

from kvactors.storage.messages import Outcome
from kvactors.storage.shares import StoreShares


class StoreStatistics(NamedTuple):
    """Sizes and counters of a store, in objects. The counters start at zero when it is opened.

    Attributes:
        objects: objects in the store, 0 if the store does not tell.
        object_bytes: bytes of one object.
        reads: objects that were read and verified.
        writes: objects that were written.
        existing: objects that were to be written and were there already.
        misses: objects that were to be read and were not there.
        corrupt: objects that a checksum refused.
        no_space: objects that found no space.
        unavailable: objects of calls that failed, or that were not made during a pause.
        late: objects that missed the deadline of their call.
        evicted: objects that the store removed for others.
        breaker: worst state of the circuit breakers of look-ups, reads and writes: closed, open, or
            half open until a trial.
        faults: calls that raised, or returned something that the contract does not allow.
        capacity: objects at most, 0 without a limit or if the store does not tell.
        quota_evictions: objects removed, or not taken, because their salt was above its quota.
        without_checksum: misses of objects that have no checksum of their payload, because another
            node of the pool has `storage.mooncake.payload_checksums` off.
        refused: objects that were not written because of a quota of a salt, or because a batch has
            more of them than the store holds.
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
    """Counts outcomes.

    Attributes:
        outcomes: number of keys by outcome.
        reads: objects read.
        writes: objects written.
        evicted: objects that the store evicted.
        without_checksum: misses of objects that have no checksum.
        shares: its objects by salt, None if it does not have them.
    """

    def __init__(self) -> None:
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.reads = self.writes = self.evicted = self.without_checksum = 0
        self.shares: StoreShares | None = None

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

    def statistics(self, objects: int, object_bytes: int, capacity: int = 0) -> StoreStatistics:
        """The counters, with the number and the size of the store's objects, and how many it
        holds at most."""
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
            "closed",  # of a store behind no `CheckedBackend`
            capacity=capacity,
            quota_evictions=0 if self.shares is None else self.shares.quota_evictions,
            without_checksum=self.without_checksum,
            refused=outcomes[Outcome.REFUSED],
        )
