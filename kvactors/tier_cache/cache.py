"""The key-addressed, synchronous face of the tiers below an engine's device blocks."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from threading import get_ident
from typing import TYPE_CHECKING, Any

from kvactors.cpu_evictor.slots import HostBlock, HostTier, SlotState
from kvactors.errors import CacheClosed, ConfigError, WrongThread
from kvactors.fork import SYSTEMS
from kvactors.tier_cache.answers import (
    CopiesInFlight,
    Lookup,
    StoreSlots,
    TierEvent,
    TierHealth,
    TierStatistics,
)
from kvactors.tier_cache.checks import checked_flag, checked_key, checked_keys, checked_parents
from kvactors.tier_cache.settings import TierConfig, checked_config
from kvactors.tier_cache.slots import SlotMemory
from kvactors.tier_cache.storage import StorageResult, StorageTier, make_storage
from kvactors.tier_cache.waits import RoomWaits, StepPace, trim
from kvactors.types import Reason, Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.sinks.base import Sink
    from kvactors.tier_cache.sinks import CacheSinks

log = logging.getLogger("kvactors")

NONE: int = 0
CLOSED: int = -1  # in the place of the owner's thread: before the first call, and after the last

MISS, PENDING, HIT = Lookup
OK = TierHealth("ok", ())

NO_GROUPS: Mapping[str, TierCache] = {}

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


class TierCache:
    """Host slots and storage, for an engine that owns device blocks and block hashes.

    The engine names blocks by keys: its opaque bytes, for instance a block hash and the number of
    a layer group. Every call answers at once from memory, without waiting for a copy or for I/O.

    The thread of the first call owns the cache, until `adopt` names another one. In other threads
    `complete_store`, `complete_load`, `touch`, `end_step` and `reset` are handed over and take
    effect at the owner's next call. Calls that answer raise WrongThread there, except
    `statistics`, `health`, `has_pending_work` and `shutdown`.

    Nothing is started before the first call (or `start`), so a cache can be made before a fork.

    Args:
        config: settings.
        memory: the host slots. Its slots and bytes must be those of the config.
        sinks: indexes to inform, beside those of the config.
        storage: a storage tier in place of the one that the config describes, not opened yet.
        groups: caches of the groups of layers whose blocks have other sizes.
        clock: the time of time-outs. A given storage tier has its own.

    Attributes:
        groups: the caches of the config's groups, by name. They are opened, reset and shut down
            with this one, and their steps end with those of this one.
        sinks: takes the paths of blocks, for the indexes. None without any.

    Raises:
        ConfigError: a setting is malformed or out of range, or a part is of a wrong type or size.
    """

    def __init__(
        self,
        config: TierConfig,
        memory: SlotMemory,
        *,
        sinks: Sequence[Sink] = (),
        storage: StorageTier | None = None,
        groups: Mapping[str, TierCache] = NO_GROUPS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config = checked_config(config)
        self.groups = groups
        _check_parts(config, memory, storage)
        self.memory = memory
        if storage is None:
            storage = make_storage(config, memory=memory, clock=clock)
        self._storage, self._results, self._clock = storage, storage.results, storage.clock
        self._has_storage = storage.make is not None
        self._thread: int = NONE  # the owner
        self._opener: dict[str, int] = {}  # the thread that opens: one of several at once
        self._opened = False
        self._closed_because = "the cache is shut down"
        self._handed: deque[Callable[[], object]] = deque()  # calls that other threads made
        self._catching_up = False
        self._pace = StepPace()
        self.sinks = self._make_sinks(sinks)
        self._feed = None if self.sinks is None else self.sinks.service.feed
        self._events: list[TierEvent] = []  # that the engine's publisher has not taken
        self._event_tiers = frozenset(Tier[name.upper()] for name in config.events)
        fed = self._feed.tiers if self._feed is not None else ()
        self._reports_storage = Tier.STORAGE in {*self._event_tiers, *fed}
        self._counts = dict.fromkeys(TierStatistics._fields, 0)

        tier = self._tier = HostTier(config.num_slots, config.num_slots)
        self._blocks = tier.blocks
        self._named: set[bytes] = set()  # parents of the blocks, and of some that have left
        self._held: set[bytes] = set()  # keys answered HIT since the last `end_step`: not evicted
        # Fetched keys that were not answered HIT yet, with the time up to which they are not
        # evicted. Without it two requests with more blocks than slots would evict each other's
        # without end.
        self._awaited: dict[bytes, float] = {}
        self._from_storage: set[bytes] = set()  # keys that were fetched, and not loaded since

        # Copies of the engine. A key whose copy is in flight at a reset keeps its slot until the
        # copy completes, and cannot be stored again before: a completion always names one slot.
        self._stores: dict[bytes, HostBlock] = {}  # to the host, in the order of begin
        self._loads: dict[bytes, list[HostBlock]] = {}  # the block of each load in flight
        settings = config.storage
        self._full_wait_s = settings.on_full_wait_s if settings.on_full == "wait" else 0.0
        self._full_since: float | None = None  # no waiting store has got a slot since then
        self._store_waits = RoomWaits(settings.timeout_s)
        self._short = [0, 0]  # stores that found too few slots, in the last step and in this one

        # Fetches. Stored keys without a slot that the engine asked for in this step or the one
        # before, in the order of their first look-ups, and the step of the last one.
        self._wanted: dict[bytes, int] = {}
        self._step = 0
        self._to_serve = False  # a key came since slots were last sought for them
        self._fetch_waits = RoomWaits(settings.slot_timeout_s)
        self._fetching: dict[HostBlock, float] = {}  # blocks of fetches in flight, since when
        self._missing: dict[bytes, float] = {}  # absent or unreadable keys, and until when
        # Keys of a store that does not list its objects: to be asked about, and asked about.
        self._unasked: dict[bytes, None] = {}
        self._asked: set[bytes] = set()
        self._trouble: str | None = None  # of the store, None if it is to be read again

        # Saves. A block that waits to be saved is pinned until `_release`. One that is evicted
        # before its turn is not saved.
        self._policy = settings.write_policy if self._has_storage else "none"
        self._streams = self._policy in ("write_through", "write_back")  # blocks go on to storage
        self._pins = settings.on_full == "wait"  # whether waiting blocks are pinned
        self._behind = False  # pins were released, and the saves of then have not ended
        self._unsaved: dict[bytes, HostBlock] = {}  # blocks that wait to be saved
        self._pinned: set[bytes] = set()  # those of them that are pinned
        self._failed_saves: set[bytes] = set()  # blocks on the host
        self._writing: set[bytes] = set()
        self._touches: Counter[bytes] = Counter()
        self._ahead = -(-tier.capacity // AHEAD)
        self._unscanned = 0  # blocks that came since the last look at the next victims
        self._announced: set[bytes] = set()  # stored keys that an event named
        self._job = self._saving = 0  # the last job of storage, and blocks of saves in flight
        self._jobs: dict[Hashable, list[HostBlock]] = {}  # of storage, and their blocks

    def _make_sinks(self, given: Sequence[Sink]) -> CacheSinks | None:
        if not self.config.sinks and isinstance(given, list | tuple) and not given:
            return None
        from kvactors.tier_cache.sinks import CacheSinks, make_sinks  # imports an event loop

        service = make_sinks(self.config, given)
        self._storage.beside.append(service)
        return CacheSinks(service, self._storage.call, self._call)

    # -- threads

    def start(self) -> None:
        """Open storage and sinks, and own the cache from now on, as any other first call does.

        Raises:
            StoreError: storage cannot be used (an OSError).
            SinkError: a sink cannot work.
            CacheClosed: the cache is shut down.
        """
        self._check_owner()

    def adopt(self) -> None:
        """Make the calling thread the owner. The former owner makes no more calls.

        Raises:
            WrongThread: another thread makes the first call, which opens the cache.
            CacheClosed: the cache is shut down.
        """
        if self._thread == CLOSED:
            raise CacheClosed(self._closed_because)
        if not self._opened:
            if not self._opens():
                raise _wrong_thread()
            SYSTEMS.add(self)
            try:
                for group in self.groups.values():
                    group.start()
                self._storage.open(self.config.storage.open_timeout_s)
            except BaseException:
                self.shutdown()
                raise
            self._opened = True
        for group in self.groups.values():
            group.adopt()
        if self._thread != CLOSED:
            self._thread = get_ident()

    def _opens(self) -> bool:
        return self._opener.setdefault("thread", get_ident()) == get_ident()

    def _check_owner(self) -> None:
        if self._thread not in (NONE, CLOSED, get_ident()):
            raise _wrong_thread()
        self.adopt()

    def _call(self, work: Callable[[], object]) -> None:
        """Do something as the owner, now or at the owner's next call."""
        if not self._hands_over(work):
            work()

    def _hands_over(self, call: Callable[[], object]) -> bool:
        """Begin a call. Returns whether it is another thread's, and waits for the owner's next."""
        if self._thread == get_ident() or (self._thread == NONE and self._opens()):
            self._enter()
            return False
        if self._thread != CLOSED:
            self._handed.append(call)
        return True

    def _enter(self) -> None:
        """Begin a call of the owner."""
        if get_ident() != self._thread:
            self._check_owner()
        if self._handed:
            self._catch_up()
        if self._results:
            self._collect()

    def _catch_up(self) -> None:
        """Make the calls that other threads have handed over, one after another.

        Each of them is a call of the owner and comes here again: it makes none of the others.
        """
        if self._catching_up:
            return
        self._catching_up = True
        try:
            while self._handed:
                try:
                    self._handed.popleft()()
                except ValueError as error:  # a fault of the other thread, whose call has returned
                    log.error("call of another thread refused: %s", error)
        finally:
            self._catching_up = False

    def _leave(self, because: str = "") -> bool:
        """No thread owns the cache any more. Returns whether this was the first call."""
        first, self._thread = self._thread != CLOSED, CLOSED
        self._closed_because = because or self._closed_because
        self._handed.clear()
        return first

    # -- look-up

    def lookup(self, key: bytes, *, storage: bool = True) -> Lookup:
        """Where a key is: HIT, PENDING or MISS.

        A key that only storage has is PENDING, and is fetched into a host slot once the step has
        ended, or the key is asked for again. If that fails, it is a MISS. While no slot is free it
        is PENDING for `storage.slot_timeout_s` seconds at most, and a MISS then.

        Args:
            key: the engine's name of a block.
            storage: whether storage is looked at. If not, a key without a slot is a MISS.

        Raises:
            ValueError: the key is no bytes, or empty.
            WrongThread: another thread owns the cache.
            CacheClosed: the cache is shut down.
        """
        if type(key) is not bytes or not key:
            key = checked_key(key)
        if get_ident() != self._thread or self._handed or self._results:
            self._enter()
        block = self._blocks.get(key)
        if block is None:
            return self._lookup_stored(key) if storage and self._has_storage else MISS
        if block.arriving:
            return self._arriving(block)
        self._held.add(key)
        if self._awaited:
            self._awaited.pop(key, None)
        return HIT

    def peek(self, key: bytes) -> Lookup:
        """Where a key is at this moment: HIT, PENDING or MISS.

        PENDING is a key that storage has, or that is on its way. No fetch begins, and a HIT may be
        evicted before the step ends. So an engine with groups finds the longest prefix that all of
        them can serve, and then looks up the keys that this prefix needs.

        Raises:
            ValueError: the key is no bytes, or empty.
            WrongThread: another thread owns the cache.
            CacheClosed: the cache is shut down.
        """
        key = checked_key(key)
        self._enter()
        block = self._blocks.get(key)
        if block is not None:
            return self._arriving(block) if block.arriving else HIT
        return PENDING if self._has_storage and self._is_stored(key) is not False else MISS

    def _arriving(self, block: HostBlock) -> Lookup:
        since = self._fetching.get(block)
        late = since is not None and self._clock() - since > self._storage.timeout + 1.0
        return MISS if late else PENDING

    def _is_stored(self, key: bytes) -> bool | None:
        """Whether storage has a key that has no host slot. None: the store is asked."""
        storage = self._storage
        held = storage.contains(key)
        if not held and storage.lists:
            return False
        if self._is_taken(key) or not self._works(key):
            return False
        if held:
            return True
        if key in self._unasked:  # the engine asks again, and has not ended its step
            self._submit_queries()
        elif key not in self._asked:
            self._unasked[key] = None
        return None

    def _lookup_stored(self, key: bytes) -> Lookup:
        """Where a key is that has no host slot. A stored key waits for one."""
        stored = self._is_stored(key)
        if not stored:
            return MISS if stored is False else PENDING
        if self._reports_storage and key not in self._announced:
            self._record_stored([key])
        now = self._clock()
        new = key not in self._wanted
        self._wanted[key] = self._step
        if new:
            self._to_serve = True
            return MISS if self._fetch_waits.refuses(key, now) else PENDING
        if self._to_serve:  # the engine asks again, and has not ended its step
            self._submit_fetches()
        served = key not in self._wanted
        return PENDING if served or self._fetch_waits.may_wait(key, now) else MISS

    def _works(self, key: bytes) -> bool:
        """Whether the store may be asked for a key: it works, and the key was not missing a short
        time ago."""
        if self._trouble is None:
            self._trouble = self._storage.trouble
        if self._trouble:
            return False
        until = self._missing.get(key)
        return until is None or self._clock() >= until

    def source(self, key: bytes) -> Tier:
        """The tier of a key's bytes: STORAGE from a fetch until the first load, then HOST."""
        return Tier.STORAGE if checked_key(key) in self._from_storage else Tier.HOST

    def end_step(self) -> None:
        """A step of the engine's scheduler has ended: keys answered HIT may be evicted, unless a
        load of them is in flight. Fetches and saves begin."""
        if self._hands_over(self.end_step):
            return
        for group in self.groups.values():
            group.end_step()
        self._end_step()
        if self._fetching or (self._has_storage and self._short[0]):
            self._pace.step_ended()

    def _end_step(self) -> None:
        """Begin fetches and saves, which evict none of the keys that were answered HIT. Then those
        may be evicted."""
        now = self._clock()
        self._trouble = None
        self._submit_queries()
        self._submit_fetches()
        self._wanted = {key: step for key, step in self._wanted.items() if step == self._step}
        self._to_serve = bool(self._wanted)
        self._step += 1
        self._submit_saves()
        self._fetch_waits.forget_before(now)
        self._held.clear()
        while self._awaited:
            key, until = next(iter(self._awaited.items()))
            if until > now:
                break
            del self._awaited[key]
        if not self._short[1]:
            self._full_since = None
        self._short = [self._short[1], 0]
        self._counts["refused_stores"] += self._store_waits.forget_before(now)
        if self._feed is not None:
            self._feed.flush()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Keys of a path were used, in the order of the path. Keys without a slot are ignored."""
        keys = checked_keys(keys)
        if self._hands_over(partial(self.touch, keys)):
            return
        self._tier.touch(reversed(keys))
        if self._policy != "write_through_selective":
            return
        for key in keys:
            block = self._tier.readable(key)
            if block is None:
                continue
            self._touches[key] += 1
            if self._touches[key] >= self.config.storage.min_hits:
                self._queue_saves([block])

    # -- copies from the device to host slots

    def prepare_store(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None] | None = None
    ) -> StoreSlots:
        """Take host slots for the first keys that have none, evicting others where needed.

        Args:
            keys: in the order of their path.
            parents: the key before each on its path, None where unknown; None if none is known.
                A key is evicted before its parent. Parents may come in a later call.

        Returns:
            The keys to copy and their slots, and the keys that wait for slots.

        Raises:
            ValueError: a key or a parent is not bytes, or there are not as many parents as keys.
            WrongThread: another thread owns the cache.
            CacheClosed: the cache is shut down.
        """
        keys = checked_keys(keys)
        parents = checked_parents(parents, len(keys))
        self._enter()
        found = self._take_slots(keys, parents)
        now = self._clock()
        if found.keys:
            self._full_since = None
        elif found.waiting and self._full_since is None:
            self._full_since = now
        since = now if self._full_since is None else self._full_since
        late = now - since >= self._full_wait_s  # 0 to shed
        if late and self._release():
            found = self._take_slots(keys, parents)
        return self._wait(found, now, late) if found.waiting else found

    def _take_slots(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None] | None
    ) -> StoreSlots:
        """The slots that can be had now. `waiting` are all other keys without one."""
        above = dict(zip(keys, parents, strict=True)) if parents else {}
        stay = [] if self._streams or not parents else self._path(parents[0])
        lacking = [key for key in dict.fromkeys(keys) if not self._is_taken(key)]
        capacity = self._tier.capacity
        share = -(-capacity // max(1, self._short[0]))  # each gets as much as the others that wait
        count, evicted = self._make_room(min(share, len(lacking)), [*keys, *stay])
        wanted, lacking = lacking[:count], lacking[count:]
        for key in reversed(above):
            self._learn_parent(key, above[key])
        slots: dict[bytes, int] = {}
        for key in reversed(wanted):  # the deepest is the oldest
            parent = self._checked_parent(key, above.get(key))
            slots[key] = self._tier.add(key, parent, SlotState.RESIDENT).slot
        for key in wanted:
            self._stores[key] = self._blocks[key]
            self._store_waits.got_slot(key)
        self._save_again(keys)
        self._on_evicted(evicted)
        given = tuple(slots[key] for key in wanted)
        return StoreSlots(tuple(wanted), given, tuple(evicted), tuple(lacking))

    def _path(self, key: bytes | None) -> list[bytes]:
        """A key and the keys before it on its path that have slots: without storage behind the host
        tier they are worth more than the blocks behind them."""
        found: list[bytes] = []
        while key and (block := self._blocks.get(key)) is not None:
            found.append(key)
            key = block.parent
        return found

    def _wait(self, found: StoreSlots, now: float, late: bool) -> StoreSlots:
        """Sort the keys without a slot: those that wait, and those that have waited in vain."""
        ends = late or not (self._tier.pinned or self._held or self._awaited)
        waiting, refused = list[bytes](), list[bytes]()
        for key in found.waiting:
            waits = not ends and self._store_waits.may_wait(key, now)
            (waiting if waits else refused).append(key)
        self._short[1] += bool(waiting)
        self._counts["refused_stores"] += len(refused)
        return found._replace(waiting=tuple(waiting), refused=tuple(refused))

    def complete_store(self, keys: Iterable[bytes], success: bool = True) -> None:
        """Copies to host slots have ended.

        Args:
            keys: that `prepare_store` gave slots for, in any order.
            success: whether the bytes are in the slots. If not, the slots are free again.

        Raises:
            ValueError: no store of a key is in flight, or a wrong type. Nothing changed.
        """
        keys, success = checked_keys(keys), checked_flag("success", success)
        if self._hands_over(partial(self.complete_store, keys, success)):
            return
        ended = set(keys)
        _check_in_flight(ended, self._stores, "store")
        many = len(ended) > 1
        ordered = [key for key in self._stores if key in ended] if many else list(ended)
        blocks = [self._stores.pop(key) for key in ordered]
        failed = frozenset() if success else frozenset(range(len(blocks)))
        landed = self._tier.land(blocks, failed)  # in the order in which their stores began
        self._counts["stored"] += len(landed)
        self._counts["failed_stores"] += len(failed)
        self._record(Tier.HOST, True, [block.hash for block in landed], Reason.OFFLOAD)
        self._unscanned += len(landed)
        if self._policy == "write_through":
            self._queue_saves(landed)
        if len(self._unsaved) >= BATCH:
            self._submit_saves()

    # -- copies from host slots to the device

    def prepare_load(self, keys: Sequence[bytes]) -> list[int]:
        """Pin the slots of keys that `lookup` answered HIT, until `complete_load`.

        Returns:
            One slot for each key.

        Raises:
            ValueError: a key has no readable slot. Nothing changed.
            WrongThread: another thread owns the cache.
            CacheClosed: the cache is shut down.
        """
        keys = checked_keys(keys)
        self._enter()
        blocks: list[HostBlock] = []
        for key in keys:
            block = self._tier.readable(key)
            if block is None:
                raise ValueError(
                    f"key {key.hex()} has no readable host slot: load only keys that lookup "
                    "answered HIT in this step"
                )
            blocks.append(block)
        for key, block in zip(keys, blocks, strict=True):
            self._tier.pin(block)
            self._loads.setdefault(key, []).append(block)
        new = self._from_storage.intersection(keys)
        self._counts["storage_hits"] += len(new)
        self._counts["host_hits"] += len(keys) - len(new)
        return [block.slot for block in blocks]

    def complete_load(self, keys: Iterable[bytes]) -> None:
        """Copies from host slots have ended, well or not.

        Raises:
            ValueError: no load of a key is in flight. Nothing changed.
        """
        keys = checked_keys(keys)
        if self._hands_over(partial(self.complete_load, keys)):
            return
        ended = Counter(keys)
        _check_in_flight(ended, self._loads, "load")
        for key, ends in ended.items():
            if ends > len(self._loads[key]):
                raise ValueError(f"{ends} loads of key {key.hex()} end, and fewer are in flight")
        for key in keys:
            self._tier.unpin(self._loads[key].pop())
            if not self._loads[key]:
                del self._loads[key]
        self._from_storage.difference_update(ended)

    def copies_in_flight(self) -> CopiesInFlight:
        """Stores and loads that were begun and not completed. They outlast a `reset`."""
        self._enter()
        loads = [key for key, blocks in self._loads.items() for _ in blocks]
        return CopiesInFlight(tuple(self._stores), tuple(loads))

    # -- host slots

    def _is_taken(self, key: bytes) -> bool:
        return key in self._blocks or key in self._stores or key in self._loads

    def _make_room(self, count: int, keys: Sequence[bytes] = ()) -> tuple[int, list[bytes]]:
        """Evict blocks for lacking slots. Returns the slots to be had and the evicted keys."""
        lacking = count - self._tier.free
        if lacking <= 0:
            return count, []
        spared = self._held.union(keys, self._awaited)
        victims = [block for block in self._tier.victims(lacking, spared) if not self._keeps(block)]
        for block in victims:
            self._tier.drop(block)
        return count - lacking + len(victims), [block.hash for block in victims]

    def _on_evicted(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            queued = self._unsaved.pop(key, None) is not None
            wanted = self._policy == "write_back" or key in self._failed_saves
            self._counts["unsaved"] += queued or (wanted and not self._storage.contains(key))
            self._failed_saves.discard(key)
            self._touches.pop(key, None)
        self._counts["evicted"] += len(keys)
        self._record(Tier.HOST, False, keys, Reason.CPU_EVICTION)
        self._from_storage.difference_update(keys)

    def _learn_parent(self, key: bytes, parent: bytes | None) -> None:
        """A key that has a slot is given its parent, if that was unknown."""
        block = self._blocks.get(key)
        if block is None or block.parent != UNKNOWN or not parent:
            return
        self._tier.move(block, SlotState.TRANSIT)
        block.parent = self._checked_parent(key, parent)
        self._tier.move(block, SlotState.RESIDENT)

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
        if len(self._named) > 2 * self._tier.capacity:
            self._named = {block.parent for block in self._blocks.values()}
        self._named.add(parent)
        return parent

    # -- which blocks are saved, and when

    def _save_again(self, keys: Iterable[bytes]) -> None:
        """The engine would store keys: writes of blocks on the host that failed are tried again."""
        again = self._failed_saves.intersection(keys) if self._policy == "write_through" else ()
        self._failed_saves.difference_update(again)
        self._queue_saves([self._blocks[key] for key in again])

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
            if key in self._unsaved or key in self._writing or self._storage.contains(key):
                continue
            self._unsaved[key] = block
            if pins and key not in self._failed_saves:
                self._tier.pin(block)
                self._pinned.add(key)

    def _pins_now(self) -> bool:
        self._behind = self._behind and bool(self._unsaved or self._writing)
        return self._pins and not self._behind

    def _release(self) -> bool:
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
            if self._storage.contains(block.hash):
                self._tier.unpin(block)
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
            self._begin([], self._storage.submit_lookup, keys[start : start + QUERY])

    def _submit_fetches(self) -> None:
        """Take slots for the stored keys that wait, as many as can be had, and read into them."""
        self._to_serve = False
        wanted = [key for key in self._wanted if not self._is_taken(key)]
        count, evicted = self._make_room(len(wanted))
        blocks = [self._tier.add(key, UNKNOWN, SlotState.RESIDENT) for key in wanted[:count]]
        self._on_evicted(evicted)
        for key in wanted[:count]:
            self._fetch_waits.got_slot(key)
        self._wanted = {key: self._wanted[key] for key in wanted[count:]}
        for start in range(0, len(blocks), BATCH):
            some = blocks[start : start + BATCH]
            self._move(self._storage.submit_load, some)
            self._fetching.update(dict.fromkeys(some, self._clock()))

    def _submit_saves(self, most: int | None = None) -> None:
        """Begin saves until so many blocks are written, by default a part of the slots."""
        if most is None:
            most = max(1, self._tier.capacity // SAVING)
        while self._saving < most:
            some = self._take_saves(min(BATCH, most - self._saving))
            if not some:
                return
            self._saving += len(some)
            self._move(self._storage.submit_store, some)

    def _move(self, submit: Callable[..., object], blocks: list[HostBlock]) -> None:
        views = [self.memory.view(block.slot) for block in blocks]
        self._begin(blocks, submit, [block.hash for block in blocks], views)

    def _begin(self, blocks: list[HostBlock], submit: Callable[..., object], *what: object) -> None:
        self._job += 1
        self._jobs[self._job] = blocks
        with suppress(CacheClosed):  # another thread shuts the cache down
            submit(self._job, *what)

    def _collect(self) -> None:
        self._trouble = None
        for result in self._storage.poll():
            blocks = self._jobs.pop(result.job, [])  # none: the job of another caller
            if result.kind == "lookup":
                self._asked.difference_update(result.keys)
                self._note_misses(result, ABSENT)
            elif result.kind == "store":
                self._saved(result, blocks)
            else:
                self._fetched(result, blocks)
        if self._unsaved:
            self._submit_saves()

    def _fetched(self, result: StorageResult, blocks: list[HostBlock]) -> None:
        for block in blocks:
            self._fetching.pop(block, None)
        failed = frozenset(i for i, ok in enumerate(result.ok) if not ok)
        self._note_misses(result, RETRY)
        landed = [block.hash for block in self._tier.land(blocks, failed)]
        self._counts["fetched"] += len(landed)
        self._counts["failed_fetches"] += len(failed)
        self._counts["fetched_bytes"] += result.nbytes
        self._from_storage.update(landed)
        until = self._clock() + AWAITED
        for key in landed:
            self._awaited[key] = until
        self._record_removed(result.removed, Reason.CORRUPT)
        self._record(Tier.HOST, True, landed, Reason.LOAD)

    def _note_misses(self, result: StorageResult, seconds: float) -> None:
        """Keys that the store lacks, or whose fetch failed, are misses for a while."""
        again = self._clock() + seconds
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
        self._record_stored(key for key in saved if self._storage.contains(key))

    # -- events. Objects of an earlier process are named when they are first found

    def _record(self, tier: Tier, stored: bool, keys: Iterable[bytes], reason: Reason) -> None:
        if tier in self._event_tiers:
            if found := tuple(keys):
                self._events.append(TierEvent(tier, stored, found, reason))
        elif self._feed is not None and tier in self._feed.tiers and (found := tuple(keys)):
            self._feed.record(tier, stored, found, reason)

    def _record_stored(self, keys: Iterable[bytes]) -> None:
        if self._reports_storage:
            new = [key for key in keys if key not in self._announced]
            self._announced.update(new)
            self._record(Tier.STORAGE, True, new, Reason.STORED)

    def _record_removed(self, keys: Iterable[bytes], reason: Reason) -> None:
        gone = [key for key in keys if key in self._announced]
        self._announced.difference_update(gone)
        self._record(Tier.STORAGE, False, gone, reason)

    # -- the rest

    def reset(self, *, storage: bool = False) -> None:
        """Forget every key of the host tier.

        The slot of a copy in flight is free when the copy completes, and its key cannot be stored
        again before. Stored objects stay, and are found by later look-ups.

        Args:
            storage: whether to delete every stored object of this identity as well, in a pool
                those of all nodes. Needed where the same keys stand for other bytes from now on
                (new weights under the same `model` and `identity`). The objects are out of reach at
                once. `has_pending_work` is true until they are deleted, and a process that is
                killed before may leave some.
        """
        storage = checked_flag("storage", storage)
        if self._hands_over(partial(self.reset, storage=storage)):
            return
        for group in self.groups.values():
            group.reset(storage=storage)
        tier = self._tier
        leaving = [*tier.victims(len(self._blocks)), *self._blocks.values()]  # children first
        removed = dict.fromkeys(block.hash for block in leaving if not block.arriving)
        self._record(Tier.HOST, False, removed, Reason.CLEAR)
        tier.clear()
        self._unpin()
        kept: Any
        for kept in (
            *(self._held, self._awaited, self._from_storage, self._touches),
            *(self._store_waits, self._fetch_waits, self._wanted, self._unasked, self._missing),
            *(self._unsaved, self._failed_saves, self._writing),
        ):
            kept.clear()
        if storage:
            self._record_removed(self._storage.clear(), Reason.CLEAR)

    def take_events(self) -> list[TierEvent]:
        """Changes of the tiers in `TierConfig.events` since the last call."""
        self._enter()
        events, self._events = self._events, []
        return events

    def has_pending_work(self) -> bool:
        """Whether copies, fetches or saves are in flight or queued, or calls of other threads
        wait. Calls of `end_step` bring all but the engine's copies to their end."""
        waiting = (self._wanted, self._unsaved, self._unasked, self._asked, self._handed)
        if any((*waiting, self._stores, self._loads, self._jobs, self._storage.clearing)):
            return True
        if any(group.has_pending_work() for group in self.groups.values()):
            return True
        return self._feed is not None and bool(self._feed.outbox or self._feed.resend)

    @property
    def saving(self) -> int:
        """Blocks that are written to storage, or wait to be: their slots return by themselves."""
        return self._saving + len(self._unsaved)

    def statistics(self) -> TierStatistics:
        """Counters and sizes."""
        sizes = {
            "slots": self._tier.num_slots,
            "resident": self._tier.resident,
            "pinned": self._tier.pinned,
            "refused_fetches": self._fetch_waits.refused,
            "stored_objects": self._storage.objects,
        }
        return TierStatistics(**(self._counts | sizes))

    def health(self) -> TierHealth:
        """Whether every tier and every sink works."""
        if self._thread == CLOSED:
            return TierHealth("closed", ())
        tier = self._storage
        stored = dict.fromkeys((tier.trouble, *tier.failing, tier.condition))
        sinks = () if self.sinks is None else self.sinks.service.troubles
        troubles = (*(f"storage: {one}" for one in stored if one), *sinks)
        for name, group in self.groups.items():
            troubles += tuple(f"group {name}: {one}" for one in group.health().reasons)
        return TierHealth("degraded", troubles) if troubles else OK

    def shutdown(self) -> None:
        """Write what is queued for storage, inform the sinks, close all and let go of the memory.

        Takes `storage.close_timeout_s` seconds at most for the cache and for each group, and a few
        more if the disk hangs. Works from any thread, any number of times. Later calls raise
        CacheClosed or do nothing.
        """
        if get_ident() == self._thread:
            self._enter()
            self._end_step()
            self._submit_saves(self.saving)
        for group in self.groups.values():
            group.shutdown()
        if not self._leave():
            return
        self._storage.close(self.config.storage.close_timeout_s)
        self._storage.poll()
        if self._storage.stuck:
            self.memory.keep()
        self.memory.close()

    def close_in_child(self) -> None:
        """Called in a forked child: the cache cannot be used there."""
        self._leave("this cache was used before a fork: open another one in the child")
        self._storage.abandon()

    def check(self) -> None:
        """AssertionError if the cache's own facts disagree, for tests."""
        self._tier.check()
        for group in self.groups.values():
            group.check()


def _wrong_thread() -> WrongThread:
    return WrongThread(
        f"{threading.current_thread().name} does not own this cache: call adopt in it first"
    )


def _check_in_flight(keys: Iterable[bytes], in_flight: Container[bytes], what: str) -> None:
    unknown = [key for key in keys if key not in in_flight]
    if unknown:
        raise ValueError(f"no {what} of key {unknown[0].hex()} is in flight")


def _check_parts(config: TierConfig, memory: Any, storage: Any) -> None:
    if config.groups:
        raise ConfigError("open_tiers opens groups: give TierCache the config of one of them")
    if not isinstance(memory, SlotMemory):
        raise ConfigError(f"memory must be a SlotMemory, not {memory!r:.80}")
    if (memory.num_slots, memory.block_bytes) != (config.num_slots, config.block_bytes):
        raise ConfigError(
            f"memory of {memory.num_slots} slots of {memory.block_bytes} bytes, and the config "
            f"has {config.num_slots} of {config.block_bytes}"
        )
    if storage is None:
        return
    if not isinstance(storage, StorageTier):
        raise ConfigError(f"storage must be a StorageTier, not {storage!r:.80}")
    if storage.block_bytes != config.block_bytes:
        raise ConfigError(
            f"storage of objects of {storage.block_bytes} bytes, and block_bytes is "
            f"{config.block_bytes}"
        )


def leading_keys(tiers: TierCache, keys: Iterable[bytes]) -> tuple[int, bool]:
    """Keys from the start that are in host slots, and whether a later one is on its way there."""
    found, waits = 0, False
    for key in keys:
        answer = tiers.lookup(key)
        if answer is MISS:
            break
        waits = waits or answer is not HIT
        found += not waits
    return found, waits


def open_tiers(
    config: TierConfig | Mapping[str, Any],
    *,
    memory: Any = None,
    stride: int | None = None,
    sinks: Sequence[Sink] = (),
    group_memory: Mapping[str, Any] = {},
) -> TierCache:
    """Open the tiers below an engine's device blocks.

    Args:
        config: settings, as a `TierConfig` or a mapping.
        memory: writable, contiguous memory for the host slots, for instance a shared mapping of the
            engine. None: new memory.
        stride: bytes from one slot to the next in `memory`. None: `block_bytes`.
        sinks: indexes to inform, beside those of the config.
        group_memory: memory for the host slots of groups, by name. Groups without: new memory.

    Raises:
        ConfigError: a setting is unknown, malformed or out of range.
        LayoutError: the memory does not fit.
    """
    checked = checked_config(config)
    if unknown := group_memory.keys() - checked.groups:
        raise ConfigError(f"group_memory names {min(unknown)!r}, and groups has no such name")
    groups = {
        name: open_tiers(checked.group(name), memory=group_memory.get(name))
        for name in checked.groups
    }
    own = checked.own if groups else checked
    slots = SlotMemory(own.num_slots, own.block_bytes, memory, stride, numa_node=own.numa_node)
    return TierCache(own, slots, sinks=sinks, groups=groups)
