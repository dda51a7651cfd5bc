"""Results of a store's batches, counted by outcome, and its circuit breaker."""

from __future__ import annotations

from typing import NamedTuple

from kvactors.storage.breaker import Breaker
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
        unavailable: objects of calls that failed.
        late: objects that missed the deadline of their call.
        evicted: objects that the store removed for others.
        breaker: state of the circuit breaker: closed, open, or half open during a trial.
        faults: calls that raised, or returned something that the contract does not allow.
        capacity: objects at most, 0 without a limit or if the store does not tell.
        quota_evictions: objects removed, or not taken, because their salt was above its quota.
        without_checksum: misses of objects that have no checksum of their payload, because another
            node of the pool has `storage.mooncake.payload_checksums` off.
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


class StoreCounters:
    """Counts outcomes and drives the circuit breaker.

    Attributes:
        breaker: opens after several batches in a row that were UNAVAILABLE altogether.
        outcomes: number of keys by outcome.
        reads: objects read.
        writes: objects written.
        evicted: objects that the store evicted.
        without_checksum: misses of objects that have no checksum.
        shares: its objects by salt, None if it does not have them.
    """

    def __init__(self, store: str = "") -> None:
        self.breaker = Breaker(store=store)
        self.outcomes = dict.fromkeys(Outcome, 0)
        self.reads = self.writes = self.evicted = self.without_checksum = 0
        self.shares: StoreShares | None = None

    def record(self, outcomes: bytes, trouble: str = "") -> None:
        """Count the outcomes of a batch, and report the batch to the circuit breaker.

        Args:
            outcomes: one byte a key.
            trouble: why the batch failed, for the log.
        """
        for outcome in set(outcomes):
            self.outcomes[Outcome(outcome)] += outcomes.count(outcome)
        failed = outcomes.count(Outcome.UNAVAILABLE) >= max(1, len(outcomes))
        self.breaker.saw(not failed, trouble)

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
            self.breaker.state(),
            capacity=capacity,
            quota_evictions=0 if self.shares is None else self.shares.quota_evictions,
            without_checksum=self.without_checksum,
        )
