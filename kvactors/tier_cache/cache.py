"""The key-addressed, synchronous face of the tiers below an engine's device blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any

from kvactors.cpu_evictor.slots import HostTier
from kvactors.errors import ConfigError
from kvactors.fork import SYSTEMS
from kvactors.tier_cache.answers import (
    CopiesInFlight,
    EventLog,
    Lookup,
    StoreSlots,
    TierEvent,
    TierHealth,
    TierStatistics,
)
from kvactors.tier_cache.checks import checked_flag, checked_key, checked_keys, checked_parents
from kvactors.tier_cache.moves import HIT, MISS, SlotMoves
from kvactors.tier_cache.owner import CLOSED, Owner, RoomWaits, StepPace
from kvactors.tier_cache.settings import TierConfig, checked_config
from kvactors.tier_cache.sinks import CacheSinks, make_sinks
from kvactors.tier_cache.slots import SlotMemory
from kvactors.tier_cache.storage import StorageTier, make_storage
from kvactors.types import Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.sinks.base import Sink


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
        clock: the time of time-outs.

    Attributes:
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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config = checked_config(config)
        _check_parts(config, memory, storage)
        self.memory = memory
        service = self._service = make_sinks(config, sinks)
        if storage is None:
            storage = make_storage(config, memory=memory, clock=clock)
        self._storage = storage
        self._results = storage.results
        if service is not None:
            storage.beside.append(service)
            service.feed.wake = partial(storage.call, service.take)
        self._tier = HostTier(config.num_slots, config.num_slots)
        self._feed = None if service is None else service.feed
        self._events = EventLog([Tier[name.upper()] for name in config.events], self._feed)
        self._counts = dict.fromkeys(TierStatistics._fields, 0)
        self._clock = clock
        settings = config.storage
        self._full_wait_s = settings.on_full_wait_s if settings.on_full == "wait" else 0.0
        self._full_since: float | None = None  # no waiting store has got a slot since then
        self._waits = RoomWaits(settings.timeout_s)
        policy = settings.write_policy if storage.make is not None else "none"
        self._streams = policy in ("write_through", "write_back")  # blocks go on to storage
        self._short = [0, 0]  # stores that found too few slots, in the last step and in this one
        parts = (self._tier, memory, storage, settings, policy, self._events, self._counts)
        self._moves = SlotMoves(*parts)
        self._held, self._awaited = self._moves.held, self._moves.awaited
        self._pace = StepPace()
        self._owner = Owner(self._open)
        self.sinks = None if service is None else CacheSinks(service, storage.call, self._call)

    # -- threads

    def start(self) -> None:
        """Open storage and sinks, and own the cache from now on, as any other first call does.

        Raises:
            StoreError: storage cannot be used (an OSError).
            SinkError: a sink cannot work.
            CacheClosed: the cache is shut down.
        """
        self._owner.check()

    def _open(self) -> None:
        SYSTEMS.add(self)
        try:
            self._storage.open(self.config.storage.open_timeout_s)
        except BaseException:
            self.shutdown()
            raise

    def adopt(self) -> None:
        """Make the calling thread the owner. The former owner makes no more calls.

        Raises:
            WrongThread: another thread makes the first call, which opens the cache.
            CacheClosed: the cache is shut down.
        """
        self._owner.adopt()

    def _call(self, work: Callable[[], object]) -> None:
        """Do something as the owner, now or at the owner's next call."""
        if not self._hands_over(work):
            work()

    def _hands_over(self, call: Callable[[], object]) -> bool:
        """Begin a call. Returns whether it is another thread's, and waits for the owner's next."""
        if self._owner.hands_over(call):
            return True
        self._enter()
        return False

    def _enter(self) -> None:
        """Begin a call of the owner."""
        if get_ident() != self._owner.thread:
            self._owner.check()
        if self._owner.handed:
            self._owner.catch_up()
        if self._results:
            self._moves.collect()

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
        owner = self._owner
        if get_ident() != owner.thread or owner.handed or self._results:
            self._enter()
        block = self._tier.blocks.get(key)
        if block is None:
            moves = self._moves
            return moves.lookup_stored(key) if storage and moves.stores else MISS
        if block.arriving:
            return self._moves.pending(block)
        self._held.add(key)
        if self._awaited:
            self._awaited.pop(key, None)
        return HIT

    def source(self, key: bytes) -> Tier:
        """The tier of a key's bytes: STORAGE from a fetch until the first load, then HOST."""
        key = checked_key(key)
        return Tier.STORAGE if key in self._moves.from_storage else Tier.HOST

    def end_step(self) -> None:
        """A step of the engine's scheduler has ended: keys answered HIT may be evicted, unless a
        load of them is in flight. Fetches and saves begin."""
        if self._hands_over(self.end_step):
            return
        self._end_step()
        if self._moves.fetching or (self._moves.stores and self._short[0]):
            self._pace.step_ended()

    def _end_step(self) -> None:
        now = self._clock()
        self._moves.end_step(now)
        if not self._short[1]:
            self._full_since = None
        self._short = [self._short[1], 0]
        self._counts["refused_stores"] += self._waits.forget_before(now)
        if self._feed is not None:
            self._feed.flush()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Keys of a path were used, in the order of the path. Keys without a slot are ignored."""
        keys = checked_keys(keys)
        if self._hands_over(partial(self.touch, keys)):
            return
        self._moves.touch(keys)

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
        if late and self._moves.release():
            found = self._take_slots(keys, parents)
        return self._wait(found, now, late) if found.waiting else found

    def _take_slots(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None] | None
    ) -> StoreSlots:
        """The slots that can be had now. `waiting` are all other keys without one."""
        capacity = self._tier.capacity
        share = -(-capacity // max(1, self._short[0]))  # each gets as much as the others that wait
        stay = [] if self._streams or not parents else self._path(parents[0])
        found = self._moves.prepare_store(keys, parents, share, stay)
        for key in found.keys:
            self._waits.got_slot(key)
        return found

    def _path(self, key: bytes | None) -> list[bytes]:
        """A key and the keys before it on its path that have slots: without storage behind the host
        tier they are worth more than the blocks behind them."""
        found: list[bytes] = []
        while key and (block := self._tier.blocks.get(key)) is not None:
            found.append(key)
            key = block.parent
        return found

    def _wait(self, found: StoreSlots, now: float, late: bool) -> StoreSlots:
        """Sort the keys without a slot: those that wait, and those that have waited in vain."""
        ends = late or not (self._tier.pinned or self._held or self._awaited)
        waiting, refused = list[bytes](), list[bytes]()
        for key in found.waiting:
            waits = not ends and self._waits.may_wait(key, now)
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
        self._moves.complete_store(keys, success)

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
        return self._moves.prepare_load(keys)

    def complete_load(self, keys: Iterable[bytes]) -> None:
        """Copies from host slots have ended, well or not.

        Raises:
            ValueError: no load of a key is in flight. Nothing changed.
        """
        keys = checked_keys(keys)
        if self._hands_over(partial(self.complete_load, keys)):
            return
        self._moves.complete_load(keys)

    def copies_in_flight(self) -> CopiesInFlight:
        """Stores and loads that were begun and not completed. They outlast a `reset`."""
        self._enter()
        return self._moves.copies_in_flight()

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
        self._waits.clear()
        self._moves.reset(storage=storage)

    def take_events(self) -> list[TierEvent]:
        """Changes of the tiers in `TierConfig.events` since the last call."""
        self._enter()
        return self._events.take()

    def has_pending_work(self) -> bool:
        """Whether copies, fetches or saves are in flight or queued, or calls of other threads
        wait. Calls of `end_step` bring all but the engine's copies to their end."""
        messages = 0 if self._feed is None else len(self._feed.outbox) + self._feed.resend
        return self._moves.pending_work + messages + len(self._owner.handed) > 0

    @property
    def saving(self) -> int:
        """Blocks that are written to storage, or wait to be: their slots return by themselves."""
        return self._moves.saving

    def statistics(self) -> TierStatistics:
        """Counters and sizes."""
        sizes = {
            "slots": self._tier.num_slots,
            "resident": self._tier.resident,
            "pinned": self._tier.pinned,
            "refused_fetches": self._moves.waits.refused,
            "stored_objects": self._storage.objects,
        }
        return TierStatistics(**(self._counts | sizes))

    def health(self) -> TierHealth:
        """Whether every tier and every sink works."""
        if self._owner.thread == CLOSED:
            return TierHealth("closed", ())
        tier = self._storage
        stored = dict.fromkeys((tier.trouble, *tier.failing, tier.condition))
        sinks = () if self._service is None else self._service.troubles
        troubles = (*(f"storage: {one}" for one in stored if one), *sinks)
        return TierHealth("degraded", troubles) if troubles else OK

    def shutdown(self) -> None:
        """Write what is queued for storage, inform the sinks, close all and let go of the memory.

        Takes `storage.close_timeout_s` seconds at most, and a few more if the disk hangs. Works
        from any thread, any number of times. Later calls raise CacheClosed or do nothing.
        """
        if get_ident() == self._owner.thread:
            self._enter()
            self._end_step()
            self._moves.write_all()
        if not self._owner.close():
            return
        self._storage.close(self.config.storage.close_timeout_s)
        self._storage.poll()
        if self._storage.stuck:
            self.memory.keep()
        self.memory.close()

    def close_in_child(self) -> None:
        """Called in a forked child: the cache cannot be used there."""
        self._owner.close("this cache was used before a fork: open another one in the child")
        self._storage.abandon()

    def check(self) -> None:
        """AssertionError if the cache's own facts disagree, for tests."""
        self._tier.check()


OK = TierHealth("ok", ())


def _check_parts(config: TierConfig, memory: Any, storage: Any) -> None:
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
) -> TierCache:
    """Open the tiers below an engine's device blocks.

    Args:
        config: settings, as a `TierConfig` or a mapping.
        memory: writable, contiguous memory for the host slots, for instance a shared mapping of the
            engine. None: new memory.
        stride: bytes from one slot to the next in `memory`. None: `block_bytes`.
        sinks: indexes to inform, beside those of the config.

    Raises:
        ConfigError: a setting is unknown, malformed or out of range.
        LayoutError: the memory does not fit.
    """
    checked = checked_config(config)
    slots = SlotMemory(
        checked.num_slots, checked.block_bytes, memory, stride, numa_node=checked.numa_node
    )
    return TierCache(checked, slots, sinks=sinks)
