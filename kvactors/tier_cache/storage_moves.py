"""Fetches from storage into host slots, and saves of host slots to storage.

Used by the thread that owns the `TierCache`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from contextlib import suppress
from itertools import islice

from kvactors.cpu_evictor.slots import HostBlock
from kvactors.errors import CacheClosed
from kvactors.settings.check import WritePolicy
from kvactors.tier_cache.answers import EventLog, Lookup
from kvactors.tier_cache.owner import RoomWaits, trim
from kvactors.tier_cache.settings import TierStorage
from kvactors.tier_cache.slots import MISS, PENDING, SlotMemory, SlotTable
from kvactors.tier_cache.storage import StorageResult, StorageTier
from kvactors.types import Reason, Tier

BATCH = 32  # blocks of a job at most
QUERY = 128  # keys of a look-up at most
AHEAD = 8  # one of so many host slots is saved ahead of its eviction, with write_back
SAVING = 4  # one of so many host slots may be pinned by saves

ABSENT = 1.0  # seconds for which the answer that a store lacks a key is used again

AWAITED = 1.0
"""Seconds that a fetched block waits for the engine to ask again before it can be evicted."""

RETRY = 5.0
"""Seconds after which a key whose fetch failed is tried again."""


class StorageMoves:
    """Moves blocks between the slots and storage.

    A block that waits to be saved is pinned until `release`. One that is evicted before its turn is
    not saved.
    """

    def __init__(
        self,
        slots: SlotTable,
        memory: SlotMemory,
        storage: StorageTier,
        settings: TierStorage,
        policy: WritePolicy,
        events: EventLog,
        counts: dict[str, int],
    ) -> None:
        self.storage = storage
        self.from_storage: set[bytes] = set()  # fetched, and not loaded since
        self.waits = RoomWaits(settings.slot_timeout_s)
        self._slots = slots
        slots.keeps = self.keeps
        self._tier = tier = slots.tier
        self._memory = memory
        self._events = events
        self._reports_storage = events.wants(Tier.STORAGE)
        self._counts = counts
        # Stored keys without a slot that the engine asked for in this step or the one before, in
        # the order of their first look-ups, and the step of the last one.
        self._wanted: dict[bytes, int] = {}
        self._step = 0
        self._to_serve = False  # a key came since slots were last sought for them
        self._in_flight: dict[Hashable, list[HostBlock]] = {}
        self._missing: dict[bytes, float] = {}  # absent or unreadable keys, and until when
        self.fetching: dict[HostBlock, float] = {}  # blocks of fetches in flight, and since when
        # keys of a store that does not list its objects: to be asked about, asked about and when
        self._unasked: dict[bytes, None] = {}
        self._asked: dict[bytes, float] = {}
        self._policy = policy
        self._min_hits = settings.min_hits
        self._ahead = -(-tier.capacity // AHEAD)
        self._pins = settings.on_full == "wait"  # whether waiting blocks are pinned
        self._behind = False  # pins were released, and the saves of then have not ended
        self._unsaved: dict[bytes, HostBlock] = {}  # blocks that wait to be saved
        self._pinned: set[bytes] = set()  # those of them that are pinned
        self._failed_saves: set[bytes] = set()  # blocks on the host
        self._writing: set[bytes] = set()
        self._touches: Counter[bytes] = Counter()
        self._unscanned = 0  # blocks that came since the last look at the next victims
        self._announced: set[bytes] = set()  # stored keys that an event named
        self._job = 0
        self._saving = 0  # blocks
        self._trouble: str | None = None  # of the store, None if it is to be read again

    # -- look-ups

    def lookup(self, key: bytes) -> Lookup:
        """Where a key is that has no host slot. A stored key waits for one."""
        storage = self.storage
        if not storage.contains(key):
            return MISS if storage.lists else self._query(key)
        if self._slots.is_taken(key) or not self._works(key):
            return MISS
        if self._reports_storage and key not in self._announced:
            self._record_stored([key])
        now = storage.clock()
        new = key not in self._wanted
        self._wanted[key] = self._step
        if new:
            self._to_serve = True
            return MISS if self.waits.refuses(key, now) else PENDING
        if self._to_serve:  # the engine asks again, and has not ended its step
            self._submit_fetches()
        served = key not in self._wanted
        return PENDING if served or self.waits.may_wait(key, now) else MISS

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
        else:
            self._unasked[key] = None
        return PENDING

    def pending(self, key: bytes) -> Lookup:
        """Where a key is whose bytes are on their way into its slot."""
        storage, since = self.storage, self.fetching.get(self._tier.blocks[key])
        late = since is not None and storage.clock() - since > storage.timeout + 1.0
        return MISS if late else PENDING

    def _works(self, key: bytes) -> bool:
        """Whether the store may be asked for a key: it works, and the key was not missing a short
        time ago."""
        if self._trouble is None:
            self._trouble = self.storage.trouble
        if self._trouble:
            return False
        until = self._missing.get(key)
        return until is None or self.storage.clock() >= until

    # -- changes of the host tier

    def on_stored(self, blocks: list[HostBlock]) -> None:
        self._unscanned += len(blocks)
        if self._policy == "write_through":
            self._queue_saves(blocks)
        if len(self._unsaved) >= BATCH:
            self._submit_saves()

    def on_offered(self, keys: Iterable[bytes]) -> None:
        """The engine would store keys: writes of blocks on the host that failed are tried again."""
        again = self._failed_saves.intersection(keys) if self._policy == "write_through" else ()
        self._failed_saves.difference_update(again)
        self._queue_saves([self._tier.blocks[key] for key in again])

    def on_touched(self, keys: Iterable[bytes]) -> None:
        if self._policy != "write_through_selective":
            return
        for key in keys:
            block = self._tier.readable(key)
            if block is None:
                continue
            self._touches[key] += 1
            if self._touches[key] >= self._min_hits:
                self._queue_saves([block])

    def on_evicted(self, keys: list[bytes] | tuple[bytes, ...]) -> None:
        for key in keys:
            queued = self._unsaved.pop(key, None) is not None
            wanted = self._policy == "write_back" or key in self._failed_saves
            self._counts["unsaved"] += queued or (wanted and not self.storage.contains(key))
            self._failed_saves.discard(key)
            self._touches.pop(key, None)
        self._counts["evicted"] += len(keys)
        self._events.record(Tier.HOST, False, keys, Reason.CPU_EVICTION)
        self.from_storage.difference_update(keys)

    # -- which blocks are saved, and when

    def keeps(self, block: HostBlock) -> bool:
        """Whether a block that is chosen to be evicted is saved first. It is pinned then."""
        failed = block.hash in self._failed_saves
        if self._policy != "write_back" or failed or not self._pins_now():
            return False
        self._queue_saves([block])
        return block.hash in self._pinned

    def _queue_saves(self, blocks: Iterable[HostBlock]) -> None:
        pins = self._pins_now()
        for block in blocks:
            key = block.hash
            if key in self._unsaved or key in self._writing or self.storage.contains(key):
                continue
            self._unsaved[key] = block
            if pins and key not in self._failed_saves:
                self._tier.pin(block)
                self._pinned.add(key)

    def _pins_now(self) -> bool:
        self._behind = self._behind and bool(self._unsaved or self._writing)
        return self._pins and not self._behind

    def release(self) -> bool:
        """Others have waited for slots for too long: unpin the waiting blocks, and pin none until
        the saves have caught up. Returns whether a block was pinned."""
        found = bool(self._pinned)
        self._unpin()
        self._behind = True
        return found

    def _unpin(self) -> None:
        for key in self._pinned:
            self._tier.unpin(self._unsaved[key])
        self._pinned.clear()

    def _scan(self) -> None:
        """Queue the next victims, if enough blocks came and there is little space left."""
        step = max(1, self._ahead // 4)
        if self._policy != "write_back" or self._unscanned < step:
            return
        if self._tier.capacity - self._tier.resident >= self._ahead:
            return
        self._unscanned = 0
        victims = islice(self._tier.candidates(), self._ahead)
        self._queue_saves([block for block in victims if not block.arriving])

    def _take_saves(self, most: int) -> list[HostBlock]:
        """Blocks to write now, at most so many. They are pinned until the end of the write."""
        self._scan()
        taken: list[HostBlock] = []
        while self._unsaved and len(taken) < most:
            block = self._unsaved.pop(next(iter(self._unsaved)))
            if block.hash not in self._pinned:
                self._tier.pin(block)
            self._pinned.discard(block.hash)
            if self.storage.contains(block.hash):
                self._tier.unpin(block)
                continue
            self._writing.add(block.hash)
            taken.append(block)
        return taken

    # -- jobs

    def submit(self) -> None:
        self._trouble = None
        self._submit_queries()
        self._submit_fetches()
        self._wanted = {key: step for key, step in self._wanted.items() if step == self._step}
        self._to_serve = bool(self._wanted)
        self._step += 1
        self._submit_saves()
        if self.waits:
            self.waits.forget_before(self.storage.clock())

    def _submit_queries(self) -> None:
        keys = list(self._unasked)
        self._unasked.clear()
        self._asked.update(dict.fromkeys(keys, self.storage.clock()))
        for start in range(0, len(keys), QUERY):
            self._begin(self.storage.submit_lookup, [], keys[start : start + QUERY])

    def _submit_fetches(self) -> None:
        """Take slots for the stored keys that wait, as many as can be had, and read into them."""
        self._to_serve = False
        wanted = [key for key in self._wanted if not self._slots.is_taken(key)]
        blocks, evicted = self._slots.take_slots(wanted)
        self.on_evicted(evicted)
        for key in wanted[: len(blocks)]:
            self.waits.got_slot(key)
        self._wanted = {key: self._wanted[key] for key in wanted[len(blocks) :]}
        for start in range(0, len(blocks), BATCH):
            some = blocks[start : start + BATCH]
            self._begin(self.storage.submit_load, some, *self._memory_of(some))
            self.fetching.update(dict.fromkeys(some, self.storage.clock()))

    def _submit_saves(self) -> None:
        self._write(max(1, self._tier.capacity // SAVING))

    def write_all(self) -> None:
        self._write(self._saving + len(self._unsaved))

    def _write(self, most: int) -> None:
        """Begin saves until so many blocks are written."""
        while self._saving < most:
            some = self._take_saves(min(BATCH, most - self._saving))
            if not some:
                return
            self._saving += len(some)
            self._begin(self.storage.submit_store, some, *self._memory_of(some))

    def _begin(self, submit: Callable[..., object], blocks: list[HostBlock], *what: object) -> None:
        self._job += 1
        self._in_flight[self._job] = blocks
        with suppress(CacheClosed):  # another thread shuts the cache down
            submit(self._job, *what)

    def _memory_of(self, blocks: list[HostBlock]) -> tuple[list[bytes], list[memoryview]]:
        view = self._memory.view
        return [block.hash for block in blocks], [view(block.slot) for block in blocks]

    def collect(self) -> None:
        self._trouble = None
        for result in self.storage.poll():
            blocks = self._in_flight.pop(result.job, [])  # none: the job of another caller
            if result.kind == "lookup":
                for key in result.keys:
                    self._asked.pop(key, None)
                self._note_misses(result, ABSENT)
            elif result.kind == "store":
                self._saved(result, blocks)
            else:
                self._fetched(result, blocks)
        if self._unsaved:
            self._submit_saves()

    def _fetched(self, result: StorageResult, blocks: list[HostBlock]) -> None:
        for block in blocks:
            self.fetching.pop(block, None)
        failed = frozenset(i for i, ok in enumerate(result.ok) if not ok)
        self._note_misses(result, RETRY)
        landed = [block.hash for block in self._tier.land(blocks, failed)]
        self._counts["fetched"] += len(landed)
        self._counts["failed_fetches"] += len(failed)
        self._counts["fetched_bytes"] += result.nbytes
        self.from_storage.update(landed)
        until = self.storage.clock() + AWAITED
        for key in landed:
            self._slots.awaited[key] = until
        self._record_removed(result.removed, Reason.CORRUPT)
        self._events.record(Tier.HOST, True, landed, Reason.LOAD)

    def _note_misses(self, result: StorageResult, seconds: float) -> None:
        """Keys that the store lacks, or whose fetch failed, are misses for a while."""
        again = self.storage.clock() + seconds
        for key, ok in zip(result.keys, result.ok, strict=True):
            self._missing.pop(key, None)
            if not ok:
                self._missing[key] = again
        trim(self._missing)

    def _saved(self, result: StorageResult, blocks: list[HostBlock]) -> None:
        self._saving -= len(blocks)
        for block, ok in zip(blocks, result.ok, strict=False):
            self._tier.unpin(block)
            if block.dropped:  # by a reset: another block may have its key
                continue
            self._writing.discard(block.hash)
            if not ok:
                self._failed_saves.add(block.hash)
        saved = [key for key, ok in zip(result.keys, result.ok, strict=True) if ok]
        for key in saved:
            self._missing.pop(key, None)
        self._counts["saved"] += len(saved)
        self._counts["failed_saves"] += len(result.keys) - len(saved)
        self._counts["saved_bytes"] += result.nbytes
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
        self._wanted.clear()
        self._unpin()
        for kept in (self._unsaved, self._failed_saves, self._writing, self._touches):
            kept.clear()
        self.waits.clear()
        self._unasked.clear()
        self._missing.clear()
        self.from_storage.clear()
        if storage:
            self._record_removed(self.storage.clear(), Reason.CLEAR)

    @property
    def saving(self) -> int:
        return self._saving + len(self._unsaved)

    @property
    def pending_work(self) -> int:
        """Blocks that wait for storage, and jobs and clears in flight."""
        waiting = len(self._wanted) + len(self._unsaved) + len(self._unasked) + len(self._asked)
        return waiting + len(self._in_flight) + self.storage.clearing
