"""The host slots of a `TierCache` by engine key: copies of the engine, eviction, fetches and saves.

State of the thread that owns the cache, without a loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from contextlib import suppress
from itertools import islice

from kvactors.cpu_evictor.slots import HostBlock, HostTier, SlotState
from kvactors.errors import CacheClosed
from kvactors.settings.check import WritePolicy
from kvactors.tier_cache.answers import CopiesInFlight, EventLog, Lookup, StoreSlots
from kvactors.tier_cache.owner import RoomWaits, trim
from kvactors.tier_cache.settings import TierStorage
from kvactors.tier_cache.slots import SlotMemory
from kvactors.tier_cache.storage import StorageResult, StorageTier
from kvactors.types import Reason, Tier

MISS, PENDING, HIT = Lookup

UNKNOWN = b""  # the parent of a block whose parent is not known. Keys are never empty.

BATCH = 32  # blocks of a job at most
QUERY = 128  # keys of a look-up at most
AHEAD = 8  # one of so many host slots is saved ahead of its eviction, with write_back
SAVING = 4  # one of so many host slots may be pinned by saves

ABSENT = 1.0  # seconds for which the answer that a store lacks a key is used again

AWAITED = 1.0
"""Seconds that a fetched block waits for the engine to ask again before it can be evicted."""

RETRY = 5.0
"""Seconds after which a key whose fetch failed is tried again."""


class SlotMoves:
    """Blocks that enter and leave the host slots of one `TierCache`.

    A key whose copy is in flight at a reset keeps its slot until the copy completes, and cannot be
    stored again before. So a completion always names one slot. A block that waits to be saved is
    pinned until `release`. One that is evicted before its turn is not saved.

    Attributes:
        held: keys answered HIT since the last `end_step`. They are not evicted.
        awaited: fetched keys that were not answered HIT yet, with the time up to which they are not
            evicted. Without it two requests with more blocks than slots would evict each other's
            without end.
        from_storage: keys that were fetched, and not loaded since.
        fetching: blocks of fetches in flight, and since when.
        stores: whether there is storage.
    """

    def __init__(
        self,
        tier: HostTier,
        memory: SlotMemory,
        storage: StorageTier,
        settings: TierStorage,
        policy: WritePolicy,
        events: EventLog,
        counts: dict[str, int],
    ) -> None:
        self.tier, self.storage = tier, storage
        self.stores = storage.make is not None
        self.held: set[bytes] = set()
        self.awaited: dict[bytes, float] = {}
        self.from_storage: set[bytes] = set()
        self.fetching: dict[HostBlock, float] = {}
        self.waits = RoomWaits(settings.slot_timeout_s)
        self._blocks = tier.blocks
        self._named: set[bytes] = set()  # parents of the blocks, and of some that have left
        self._stores: dict[bytes, HostBlock] = {}  # copies to the host, in the order of begin
        self._loads: dict[bytes, list[HostBlock]] = {}  # the block of each load in flight
        self._memory = memory
        self._events = events
        self._reports_storage = events.wants(Tier.STORAGE)
        self._counts = counts
        # Stored keys without a slot that the engine asked for in this step or the one before, in
        # the order of their first look-ups, and the step of the last one.
        self._wanted: dict[bytes, int] = {}
        self._step = 0
        self._to_serve = False  # a key came since slots were last sought for them
        self._jobs: dict[Hashable, list[HostBlock]] = {}  # of storage, and their blocks
        self._missing: dict[bytes, float] = {}  # absent or unreadable keys, and until when
        # keys of a store that does not list its objects: to be asked about, asked about and when
        self._unasked: dict[bytes, None] = {}
        self._asked: set[bytes] = set()
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

    def pending(self, block: HostBlock) -> Lookup:
        """The answer for a block whose bytes are on their way into its slot."""
        since = self.fetching.get(block)
        late = since is not None and self.storage.clock() - since > self.storage.timeout + 1.0
        return MISS if late else PENDING

    def lookup_stored(self, key: bytes) -> Lookup:
        """Where a key is that has no host slot. A stored key waits for one."""
        storage = self.storage
        if not storage.contains(key):
            return MISS if storage.lists else self._query(key)
        if self.is_taken(key) or not self._works(key):
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
        if self.is_taken(key) or not self._works(key):
            return MISS
        if key in self._unasked:  # the engine asks again, and has not ended its step
            self._submit_queries()
        elif key not in self._asked:
            self._unasked[key] = None
        return PENDING

    def _works(self, key: bytes) -> bool:
        """Whether the store may be asked for a key: it works, and the key was not missing a short
        time ago."""
        if self._trouble is None:
            self._trouble = self.storage.trouble
        if self._trouble:
            return False
        until = self._missing.get(key)
        return until is None or self.storage.clock() >= until

    def end_step(self, now: float) -> None:
        """Begin fetches and saves, which evict none of the keys that were answered HIT. Then those
        may be evicted."""
        self._trouble = None
        self._submit_queries()
        self._submit_fetches()
        self._wanted = {key: step for key, step in self._wanted.items() if step == self._step}
        self._to_serve = bool(self._wanted)
        self._step += 1
        self._submit_saves()
        if self.waits:
            self.waits.forget_before(self.storage.clock())
        self.held.clear()
        while self.awaited:
            key, until = next(iter(self.awaited.items()))
            if until > now:
                break
            del self.awaited[key]

    # -- copies of the engine: stores

    def prepare_store(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None] | None,
        most: int,
        stay: Sequence[bytes],
    ) -> StoreSlots:
        """Take slots for the first keys that have none, as many as can be had.

        Args:
            parents: None where unknown. Keys that have a slot learn theirs too.
            most: slots at most.
            stay: keys that are not evicted, beside `keys`.
        """
        above = dict(zip(keys, parents, strict=True)) if parents else {}
        lacking = [key for key in dict.fromkeys(keys) if not self.is_taken(key)]
        count, evicted = self._make_room(min(most, len(lacking)), [*keys, *stay])
        wanted, lacking = lacking[:count], lacking[count:]
        for key in reversed(above):
            self._learn_parent(key, above[key])
        slots: dict[bytes, int] = {}
        for key in reversed(wanted):  # the deepest is the oldest
            parent = self._checked_parent(key, above.get(key))
            slots[key] = self.tier.add(key, parent, SlotState.RESIDENT).slot
        for key in wanted:
            self._stores[key] = self._blocks[key]
        given = tuple(slots[key] for key in wanted)
        self._save_again(keys)
        self._on_evicted(evicted)
        return StoreSlots(tuple(wanted), given, tuple(evicted), tuple(lacking))

    def _learn_parent(self, key: bytes, parent: bytes | None) -> None:
        """A key that has a slot is given its parent, if that was unknown."""
        block = self._blocks.get(key)
        if block is None or block.parent != UNKNOWN or not parent:
            return
        self.tier.move(block, SlotState.TRANSIT)
        block.parent = self._checked_parent(key, parent)
        self.tier.move(block, SlotState.RESIDENT)

    def _checked_parent(self, key: bytes, parent: bytes | None) -> bytes:
        """The parent, or UNKNOWN if the key is among its ancestors: neither could be evicted."""
        if not parent or parent == key:
            return UNKNOWN
        if key in self._named:
            above = parent
            while above != key:
                block = self._blocks.get(above)
                if block is None:
                    break
                above = block.parent
            else:
                return UNKNOWN
        if len(self._named) > 2 * self.tier.capacity:
            self._named = {block.parent for block in self._blocks.values()}
        self._named.add(parent)
        return parent

    def is_taken(self, key: bytes) -> bool:
        return key in self._blocks or key in self._stores or key in self._loads

    def _make_room(self, count: int, keys: Sequence[bytes] = ()) -> tuple[int, list[bytes]]:
        """Evict blocks for lacking slots. Returns the slots to be had and the evicted keys."""
        lacking = count - self.tier.free
        if lacking <= 0:
            return count, []
        spared = self.held.union(keys, self.awaited)
        victims = [block for block in self.tier.victims(lacking, spared) if not self._keeps(block)]
        for block in victims:
            self.tier.drop(block)
        return count - lacking + len(victims), [block.hash for block in victims]

    def complete_store(self, keys: Iterable[bytes], success: bool) -> None:
        ended = set(keys)
        self._check_in_flight(ended, self._stores, "store")
        many = len(ended) > 1
        ordered = [key for key in self._stores if key in ended] if many else list(ended)
        blocks = [self._stores.pop(key) for key in ordered]
        failed = frozenset() if success else frozenset(range(len(blocks)))
        landed = self.tier.land(blocks, failed)  # in the order in which their stores began
        self._counts["stored"] += len(landed)
        self._counts["failed_stores"] += len(failed)
        self._events.record(Tier.HOST, True, [block.hash for block in landed], Reason.OFFLOAD)
        self._unscanned += len(landed)
        if self._policy == "write_through":
            self._queue_saves(landed)
        if len(self._unsaved) >= BATCH:
            self._submit_saves()

    # -- copies of the engine: loads

    def prepare_load(self, keys: Sequence[bytes]) -> list[int]:
        blocks: list[HostBlock] = []
        for key in keys:
            block = self.tier.readable(key)
            if block is None:
                raise ValueError(
                    f"key {key.hex()} has no readable host slot: load only keys that lookup "
                    "answered HIT in this step"
                )
            blocks.append(block)
        for key, block in zip(keys, blocks, strict=True):
            self.tier.pin(block)
            self._loads.setdefault(key, []).append(block)
        new = self.from_storage.intersection(keys)
        self._counts["storage_hits"] += len(new)
        self._counts["host_hits"] += len(keys) - len(new)
        return [block.slot for block in blocks]

    def complete_load(self, keys: Iterable[bytes]) -> None:
        ended = Counter(keys)
        self._check_in_flight(ended, self._loads, "load")
        for key, ends in ended.items():
            if ends > len(self._loads[key]):
                raise ValueError(f"{ends} loads of key {key.hex()} end, and fewer are in flight")
        for key in ended.elements():
            self.tier.unpin(self._loads[key].pop())
            if not self._loads[key]:
                del self._loads[key]
        self.from_storage.difference_update(ended)

    @staticmethod
    def _check_in_flight(keys: Iterable[bytes], in_flight: Container[bytes], what: str) -> None:
        unknown = [key for key in keys if key not in in_flight]
        if unknown:
            raise ValueError(f"no {what} of key {unknown[0].hex()} is in flight")

    def copies_in_flight(self) -> CopiesInFlight:
        loads = [key for key, blocks in self._loads.items() for _ in blocks]
        return CopiesInFlight(tuple(self._stores), tuple(loads))

    # -- which blocks are saved, and when

    def touch(self, keys: Sequence[bytes]) -> None:
        self.tier.touch(reversed(keys))
        if self._policy != "write_through_selective":
            return
        for key in keys:
            block = self.tier.readable(key)
            if block is None:
                continue
            self._touches[key] += 1
            if self._touches[key] >= self._min_hits:
                self._queue_saves([block])

    def _save_again(self, keys: Iterable[bytes]) -> None:
        """The engine would store keys: writes of blocks on the host that failed are tried again."""
        again = self._failed_saves.intersection(keys) if self._policy == "write_through" else ()
        self._failed_saves.difference_update(again)
        self._queue_saves([self._blocks[key] for key in again])

    def _on_evicted(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            queued = self._unsaved.pop(key, None) is not None
            wanted = self._policy == "write_back" or key in self._failed_saves
            self._counts["unsaved"] += queued or (wanted and not self.storage.contains(key))
            self._failed_saves.discard(key)
            self._touches.pop(key, None)
        self._counts["evicted"] += len(keys)
        self._events.record(Tier.HOST, False, keys, Reason.CPU_EVICTION)
        self.from_storage.difference_update(keys)

    def _keeps(self, block: HostBlock) -> bool:
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
                self.tier.pin(block)
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
            self.tier.unpin(self._unsaved[key])
        self._pinned.clear()

    def _scan(self) -> None:
        """Queue the next victims, if enough blocks came and there is little space left."""
        step = max(1, self._ahead // 4)
        if self._policy != "write_back" or self._unscanned < step:
            return
        if self.tier.capacity - self.tier.resident >= self._ahead:
            return
        self._unscanned = 0
        victims = islice(self.tier.candidates(), self._ahead)
        self._queue_saves([block for block in victims if not block.arriving])

    def _take_saves(self, most: int) -> list[HostBlock]:
        """Blocks to write now, at most so many. They are pinned until the end of the write."""
        self._scan()
        taken: list[HostBlock] = []
        while self._unsaved and len(taken) < most:
            block = self._unsaved.pop(next(iter(self._unsaved)))
            if block.hash not in self._pinned:
                self.tier.pin(block)
            self._pinned.discard(block.hash)
            if self.storage.contains(block.hash):
                self.tier.unpin(block)
                continue
            self._writing.add(block.hash)
            taken.append(block)
        return taken

    # -- jobs of storage

    def _submit_queries(self) -> None:
        keys = list(self._unasked)
        self._unasked.clear()
        self._asked.update(keys)
        for start in range(0, len(keys), QUERY):
            self._begin(self.storage.submit_lookup, [], keys[start : start + QUERY])

    def _submit_fetches(self) -> None:
        """Take slots for the stored keys that wait, as many as can be had, and read into them."""
        self._to_serve = False
        wanted = [key for key in self._wanted if not self.is_taken(key)]
        count, evicted = self._make_room(len(wanted))
        blocks = [self.tier.add(key, UNKNOWN, SlotState.RESIDENT) for key in wanted[:count]]
        self._on_evicted(evicted)
        for key in wanted[: len(blocks)]:
            self.waits.got_slot(key)
        self._wanted = {key: self._wanted[key] for key in wanted[len(blocks) :]}
        for start in range(0, len(blocks), BATCH):
            some = blocks[start : start + BATCH]
            self._begin(self.storage.submit_load, some, *self._memory_of(some))
            self.fetching.update(dict.fromkeys(some, self.storage.clock()))

    def _submit_saves(self) -> None:
        self._write(max(1, self.tier.capacity // SAVING))

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
        self._jobs[self._job] = blocks
        with suppress(CacheClosed):  # another thread shuts the cache down
            submit(self._job, *what)

    def _memory_of(self, blocks: list[HostBlock]) -> tuple[list[bytes], list[memoryview]]:
        view = self._memory.view
        return [block.hash for block in blocks], [view(block.slot) for block in blocks]

    def collect(self) -> None:
        self._trouble = None
        for result in self.storage.poll():
            blocks = self._jobs.pop(result.job, [])  # none: the job of another caller
            if result.kind == "lookup":
                for key in result.keys:
                    self._asked.discard(key)
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
        landed = [block.hash for block in self.tier.land(blocks, failed)]
        self._counts["fetched"] += len(landed)
        self._counts["failed_fetches"] += len(failed)
        self._counts["fetched_bytes"] += result.nbytes
        self.from_storage.update(landed)
        until = self.storage.clock() + AWAITED
        for key in landed:
            self.awaited[key] = until
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
            self.tier.unpin(block)
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
        """Forget every key. Slots of copies in flight are free when those complete."""
        leaving = [*self.tier.victims(len(self._blocks)), *self._blocks.values()]  # children first
        removed = dict.fromkeys(block.hash for block in leaving if not block.arriving)
        self._events.record(Tier.HOST, False, removed, Reason.CLEAR)
        self.tier.clear()
        self.held.clear()
        self.awaited.clear()
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
        """Blocks that wait for storage, and copies, jobs and clears in flight."""
        waiting = len(self._wanted) + len(self._unsaved) + len(self._unasked) + len(self._asked)
        copies = len(self._stores) + len(self._loads)
        return waiting + copies + len(self._jobs) + self.storage.clearing
