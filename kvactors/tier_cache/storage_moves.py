"""Fetches from storage into host slots, and saves of host slots to storage.

Used by the thread that owns the `TierCache`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import suppress

from kvactors.cpu_evictor.slots import HostBlock
from kvactors.errors import CacheClosed
from kvactors.tier_cache.answers import EventLog, Lookup, TierCounters
from kvactors.tier_cache.owner import RoomWaits, trim
from kvactors.tier_cache.slots import MISS, PENDING, SaveQueue, SlotMemory, SlotTable
from kvactors.tier_cache.storage import StorageResult, StorageTier
from kvactors.types import Reason, Tier

BATCH = 32  # blocks of a job at most
QUERY = 128  # keys of a look-up at most
SAVING = 4  # one of so many host slots may be pinned by saves

ABSENT = 1.0  # seconds for which the answer that a store lacks a key is used again

AWAITED = 1.0
"""Seconds that a fetched block waits for the engine to ask again before it can be evicted."""

RETRY = 5.0
"""Seconds after which a store that does not work, or a key whose fetch failed, is tried again."""


class StorageMoves:
    """Moves blocks between the slots and storage.

    Args:
        patience: seconds for which a stored key may wait for a host slot.
    """

    def __init__(
        self,
        slots: SlotTable,
        memory: SlotMemory,
        storage: StorageTier,
        saves: SaveQueue,
        events: EventLog,
        counters: TierCounters,
        patience: float,
    ) -> None:
        self.storage = storage
        self.saves = saves
        self.from_storage: set[bytes] = set()  # fetched, and not loaded since
        self.waits = RoomWaits(patience)
        self._slots = slots
        self._memory = memory
        self._events = events
        self._short = [0, 0]  # look-ups that found no slot, in the last step and in this one
        self._reports_storage = events.wants(Tier.STORAGE)
        self._counters = counters
        self._queued: dict[bytes, HostBlock] = {}  # fetches that were not submitted
        self._in_flight: dict[Hashable, list[HostBlock]] = {}
        self._late: set[bytes] = set()  # keys whose fetch takes longer than the store's timeout
        self._failed: dict[bytes, float] = {}  # fetches that failed, and when to try again
        self._started: dict[Hashable, float] = {}  # of fetches
        # keys of a store that does not list its objects: to be asked about, asked about and when,
        # and absent until when
        self._unasked: dict[bytes, None] = {}
        self._asked: dict[bytes, float] = {}
        self._absent: dict[bytes, float] = {}
        self._announced: set[bytes] = set()  # stored keys that an event named
        self._job = 0
        self._saving = 0  # blocks
        self._retry_at = 0.0
        self._trouble: str | None = None  # of the store, None if it is to be read again

    @property
    def is_fetching(self) -> bool:
        return bool(self._started)

    @property
    def loads_waiting(self) -> int:
        """Look-ups that found no slot, in this step and the one before."""
        return sum(self._short)

    # -- look-ups

    def lookup(self, key: bytes) -> Lookup:
        """Where a key is that has no host slot. A stored key gets one, and its fetch is queued.
        Without a free slot it waits for one."""
        storage = self.storage
        if not storage.contains(key):
            return MISS if storage.lists else self._query(key)
        if self._slots.is_taken(key) or not self._works(key):
            return MISS
        if self._reports_storage and key not in self._announced:
            self._record_stored([key])
        found = self._slots.take_slot(key)
        if found is None:
            self._short[1] += 1
            return PENDING if self.waits.may_wait(key, storage.clock()) else MISS
        self.waits.got_slot(key)
        block, evicted = found
        self.on_evicted(evicted)
        self._queued[key] = block
        return PENDING

    def _query(self, key: bytes) -> Lookup:
        """Where a key is that a store without a list of its objects may have."""
        if self._slots.is_taken(key) or not self._works(key):
            return MISS
        now = self.storage.clock()
        asked = self._asked.get(key)
        if key in self._unasked:  # the engine asks again, and has not ended its step
            self._submit_queries()
        elif asked is not None:
            return PENDING if now - asked < self.storage.timeout + 1.0 else MISS
        elif now < self._absent.get(key, now):
            return MISS
        else:
            self._unasked[key] = None
        return PENDING

    def pending(self, key: bytes) -> Lookup:
        """Where a key is whose bytes are on their way into its slot."""
        if key in self._queued:  # the engine asks again, and has not ended its step
            self._submit_fetches()
        return MISS if key in self._late else PENDING

    def _works(self, key: bytes) -> bool:
        """Whether the store may be asked for a key. A failure is tried again after a while."""
        trouble = self._trouble
        if trouble is None:
            trouble = self._trouble = self.storage.trouble
        if not trouble and key not in self._failed:
            return True
        now = self.storage.clock()
        if now < self._failed.get(key, 0.0) or (trouble and now < self._retry_at):
            return False
        self._retry_at = now + RETRY
        return True

    # -- changes of the host tier

    def on_stored(self, blocks: list[HostBlock]) -> None:
        self.saves.on_stored(blocks)
        if len(self.saves) >= BATCH:
            self._submit_saves()

    def on_evicted(self, keys: list[bytes] | tuple[bytes, ...]) -> None:
        self._counters.evicted += len(keys)
        self._counters.unsaved += self.saves.on_evicted(keys)
        self._events.record(Tier.HOST, False, keys, Reason.CPU_EVICTION)
        self.from_storage.difference_update(keys)

    # -- jobs

    def submit(self) -> None:
        self._trouble = None
        self._short = [self._short[1], 0]
        self._submit_queries()
        self._submit_fetches()
        self._submit_saves()
        if self._started:
            self._find_late()
        if self.waits:
            self.waits.forget_before(self.storage.clock())

    def _submit_queries(self) -> None:
        keys = list(self._unasked)
        self._unasked.clear()
        self._asked.update(dict.fromkeys(keys, self.storage.clock()))
        for start in range(0, len(keys), QUERY):
            self._begin([])
            with suppress(CacheClosed):  # another thread shuts the cache down
                self.storage.submit_lookup(self._job, keys[start : start + QUERY])

    def _submit_fetches(self) -> None:
        blocks = list(self._queued.values())
        self._queued.clear()
        for start in range(0, len(blocks), BATCH):
            some = blocks[start : start + BATCH]
            self._begin(some)
            self._started[self._job] = self.storage.clock()
            with suppress(CacheClosed):  # another thread shuts the cache down
                self.storage.submit_load(self._job, *self._memory_of(some))

    def _submit_saves(self) -> None:
        self._write(max(1, self._slots.tier.capacity // SAVING))

    def write_all(self) -> None:
        self._write(self._saving + len(self.saves))

    def _write(self, most: int) -> None:
        """Begin saves until so many blocks are written."""
        while self._saving < most:
            some = self.saves.take(min(BATCH, most - self._saving))
            if not some:
                return
            self._saving += len(some)
            self._begin(some)
            with suppress(CacheClosed):  # another thread shuts the cache down
                self.storage.submit_store(self._job, *self._memory_of(some))

    def _begin(self, blocks: list[HostBlock]) -> None:
        self._job += 1
        self._in_flight[self._job] = blocks

    def _memory_of(self, blocks: list[HostBlock]) -> tuple[list[bytes], list[memoryview]]:
        view = self._memory.view
        return [block.hash for block in blocks], [view(block.slot) for block in blocks]

    def _find_late(self) -> None:
        limit = self.storage.clock() - self.storage.timeout - 1.0
        for job, started in list(self._started.items()):
            if started > limit:
                return
            del self._started[job]
            self._late.update(block.hash for block in self._in_flight[job])

    def collect(self) -> None:
        self._trouble = None
        for result in self.storage.poll():
            blocks = self._in_flight.pop(result.job, [])  # none: the job of another caller
            if result.kind == "lookup":
                self._answered(result)
            elif result.kind == "store":
                self._saved(result, blocks)
            else:
                self._fetched(result, blocks)
        if self.saves:
            self._submit_saves()

    def _answered(self, result: StorageResult) -> None:
        until = self.storage.clock() + ABSENT
        for key, present in zip(result.keys, result.ok, strict=True):
            self._asked.pop(key, None)
            self._absent.pop(key, None)
            if not present:
                self._absent[key] = until
        trim(self._absent)

    def _fetched(self, result: StorageResult, blocks: list[HostBlock]) -> None:
        self._started.pop(result.job, None)
        if self._late:
            self._late.difference_update(result.keys)
        failed = frozenset(i for i, ok in enumerate(result.ok) if not ok)
        self._note_failures(result)
        landed = [block.hash for block in self._slots.tier.land(blocks, failed)]
        self._counters.fetched += len(landed)
        self._counters.failed_fetches += len(failed)
        self._counters.fetched_bytes += result.nbytes
        self.from_storage.update(landed)
        until = self.storage.clock() + AWAITED
        for key in landed:
            self._slots.awaited[key] = until
        self._record_removed(result.removed, Reason.CORRUPT)
        self._events.record(Tier.HOST, True, landed, Reason.LOAD)

    def _note_failures(self, result: StorageResult) -> None:
        """A key whose fetch failed is a miss for a while, so that no request waits for it."""
        again = self.storage.clock() + RETRY
        for key, ok in zip(result.keys, result.ok, strict=True):
            self._failed.pop(key, None)
            if not ok:
                self._failed[key] = again
        trim(self._failed)

    def _saved(self, result: StorageResult, blocks: list[HostBlock]) -> None:
        self._saving -= len(blocks)
        self.saves.on_ended(blocks, result.ok)
        saved = [key for key, ok in zip(result.keys, result.ok, strict=True) if ok]
        for key in saved:
            self._failed.pop(key, None)
            self._absent.pop(key, None)
        self._counters.saved += len(saved)
        self._counters.failed_saves += len(result.keys) - len(saved)
        self._counters.saved_bytes += result.nbytes
        self._record_removed(result.removed, Reason.STORAGE_EVICTION)
        self._record_stored(key for key in saved if self.storage.contains(key))

    # -- events of storage: objects of an earlier process are named when they are first found

    def _record_stored(self, keys: Iterable[bytes]) -> None:
        if self._reports_storage:
            new = [key for key in keys if key not in self._announced]
            self._announced.update(new)
            self._events.record(Tier.STORAGE, True, new, Reason.STORED)

    def _record_removed(self, keys: Iterable[bytes], reason: Reason) -> None:
        gone = [key for key in keys if key in self._announced]
        self._announced.difference_update(gone)
        self._events.record(Tier.STORAGE, False, gone, reason)

    # -- the rest

    def reset(self, *, storage: bool) -> None:
        queued = list(self._queued.values())
        self._queued.clear()
        self._slots.tier.land(queued, frozenset(range(len(queued))))
        self.saves.clear()
        self.waits.clear()
        self._unasked.clear()
        self._absent.clear()
        self.from_storage.clear()
        if storage:
            self._record_removed(self.storage.clear(), Reason.CLEAR)

    @property
    def saving(self) -> int:
        """Blocks that are written, or wait to be."""
        return self._saving + len(self.saves)

    @property
    def pending_work(self) -> int:
        """Blocks that wait for storage, and jobs and clears in flight."""
        waiting = len(self._queued) + len(self.saves) + len(self._unasked) + len(self._asked)
        return waiting + len(self._in_flight) + self.storage.clearing
