"""Host slots, storage, events and counters of one `TierCache`. Used by the thread that owns it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvactors.cpu_evictor.policy import POLICIES
from kvactors.cpu_evictor.slots import HostTier
from kvactors.tier_cache.answers import StoreSlots, TierStatistics
from kvactors.tier_cache.counters import TierCounters
from kvactors.tier_cache.event_log import EventLog
from kvactors.tier_cache.room_waits import RoomWaits
from kvactors.tier_cache.save_policy import SaveQueue
from kvactors.tier_cache.settings import TierConfig
from kvactors.tier_cache.sink_feed import SinkFeed
from kvactors.tier_cache.slot_memory import SlotMemory
from kvactors.tier_cache.slot_table import SlotTable
from kvactors.tier_cache.storage_moves import StorageMoves
from kvactors.tier_cache.storage_tier import StorageTier
from kvactors.types import Reason, Tier

LOADS = 3
"""Quarters of the host slots that stores leave to look-ups that wait for slots."""


class Tiers:
    """Keeps slots, storage, events and counters in step.

    Args:
        config: settings.
        memory: the host slots.
        storage: the tier below, None for none.
        clock: the time of time-outs.
        feed: takes changes for sinks.

    Attributes:
        slots: the host tier by key.
        moves: fetches and saves, None without storage.
        events: changes that the engine's publisher takes.
    """

    def __init__(
        self,
        config: TierConfig,
        memory: SlotMemory,
        storage: StorageTier | None,
        clock: Callable[[], float],
        feed: SinkFeed | None = None,
    ) -> None:
        self._tier = HostTier(config.num_slots, config.num_slots, policy=POLICIES[config.policy]())
        self.events = EventLog([Tier[name.upper()] for name in config.events], feed)
        self.feed = feed
        self._counters = TierCounters()
        self._clock = clock
        settings = config.storage
        waits = settings.on_full == "wait"
        self._full_wait_s = settings.on_full_wait_s if waits else 0.0
        self._full_since: float | None = None  # no waiting store has got a slot since then
        self._waits = RoomWaits(settings.timeout_s)
        self._streams = False  # whether blocks go on to storage
        self._short = [0, 0]  # stores that found too few slots, in the last step and in this one
        self.moves: StorageMoves | None = None
        if storage is None:
            self.slots = SlotTable(self._tier)
        else:
            saves = SaveQueue(
                settings.write_policy,
                settings.min_hits,
                self._tier,
                storage.contains,
                waits,
            )
            self._streams = settings.write_policy in ("write_through", "write_back")
            self.slots = SlotTable(self._tier, saves.keeps)
            self.moves = StorageMoves(
                self.slots,
                memory,
                storage,
                saves,
                self.events,
                self._counters,
                settings.slot_timeout_s,
            )

    def end_step(self) -> None:
        """See `TierCache.end_step`."""
        now = self._clock()
        self.slots.end_step(now)
        if not self._short[1]:
            self._full_since = None
        self._short = [self._short[1], 0]
        self._counters.refused_stores += self._waits.forget_before(now)
        if self.moves is not None:
            self.moves.submit()
        if self.feed is not None:
            self.feed.flush()

    def end(self) -> None:
        """The last step: every save that is queued begins."""
        self.end_step()
        if self.moves is not None:
            self.moves.write_all()

    def touch(self, keys: Sequence[bytes]) -> None:
        """See `TierCache.touch`."""
        self.slots.touch(keys)
        if self.moves is not None:
            self.moves.saves.on_touched(keys)

    def prepare_store(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None] | None
    ) -> StoreSlots:
        """See `TierCache.prepare_store`."""
        found = self._take_slots(keys, parents)
        now = self._clock()
        if found.keys:
            self._full_since = None
        elif found.waiting and self._full_since is None:
            self._full_since = now
        since = now if self._full_since is None else self._full_since
        late = now - since >= self._full_wait_s  # 0 to shed
        if late and self.moves is not None and self.moves.saves.release():
            found = self._take_slots(keys, parents)
        return self._wait(found, now, late) if found.waiting else found

    def _take_slots(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None] | None
    ) -> StoreSlots:
        """The slots that can be had now. `waiting` are all other keys without one."""
        capacity = self._tier.capacity
        share = -(-capacity // max(1, self._short[0]))  # each gets as much as the others that wait
        loads = 0 if self.moves is None else self.moves.loads_waiting
        spare = min(loads, -(-capacity * LOADS // 4))
        stay = [] if self._streams or not parents else self._path(parents[0])
        found = self.slots.prepare_store(keys, parents, share, spare, stay)
        if self.moves is not None:
            self.moves.saves.on_offered(keys)
            self.moves.on_evicted(found.evicted)
        elif found.evicted:
            self._counters.evicted += len(found.evicted)
            self.events.record(Tier.HOST, False, found.evicted, Reason.CPU_EVICTION)
        for key in found.keys:
            self._waits.got_slot(key)
        return found

    def _path(self, key: bytes | None) -> list[bytes]:
        """A key and the keys before it on its path, as far as they have slots. Where blocks do not
        go on to storage, they are worth more than the blocks behind them."""
        found: list[bytes] = []
        while key and (block := self._tier.blocks.get(key)) is not None:
            found.append(key)
            key = block.parent
        return found

    def _wait(self, found: StoreSlots, now: float, late: bool) -> StoreSlots:
        """Sort the keys without a slot: those that wait, and those that have waited in vain."""
        ends = late or not (self._tier.pinned or self.slots.held or self.slots.awaited)
        waiting, refused = list[bytes](), list[bytes]()
        for key in found.waiting:
            waits = not ends and self._waits.may_wait(key, now)
            (waiting if waits else refused).append(key)
        self._short[1] += bool(waiting)
        self._counters.refused_stores += len(refused)
        return found._replace(waiting=tuple(waiting), refused=tuple(refused))

    def complete_store(self, keys: Sequence[bytes], success: bool) -> None:
        """See `TierCache.complete_store`."""
        landed = self.slots.complete_store(keys, success)
        self._counters.stored += len(landed)
        self._counters.failed_stores += 0 if success else len(set(keys))
        self.events.record(Tier.HOST, True, [block.hash for block in landed], Reason.OFFLOAD)
        if self.moves is not None:
            self.moves.on_stored(landed)

    def prepare_load(self, keys: Sequence[bytes]) -> list[int]:
        """See `TierCache.prepare_load`."""
        slots = self.slots.prepare_load(keys)
        new = self.moves.from_storage.intersection(keys) if self.moves is not None else ()
        self._counters.storage_hits += len(new)
        self._counters.host_hits += len(keys) - len(new)
        return slots

    def complete_load(self, keys: Sequence[bytes]) -> None:
        """See `TierCache.complete_load`."""
        self.slots.complete_load(keys)
        if self.moves is not None:
            self.moves.from_storage.difference_update(keys)

    def source(self, key: bytes) -> Tier:
        """See `TierCache.source`."""
        fetched = self.moves is not None and key in self.moves.from_storage
        return Tier.STORAGE if fetched else Tier.HOST

    def reset(self, *, storage: bool) -> None:
        """See `TierCache.reset`."""
        self.events.record(Tier.HOST, False, self.slots.reset(), Reason.CLEAR)
        self._waits.clear()
        if self.moves is not None:
            self.moves.reset(storage=storage)

    @property
    def stores_waiting(self) -> bool:
        """Whether a store found too few slots in the last step."""
        return bool(self._short[0])

    @property
    def pending_work(self) -> int:
        """Copies, blocks and jobs of storage, and messages to sinks."""
        messages = 0 if self.feed is None else len(self.feed.outbox) + self.feed.resend
        storage = 0 if self.moves is None else self.moves.pending_work
        return self.slots.in_flight + storage + messages

    def statistics(self) -> TierStatistics:
        """See `TierCache.statistics`."""
        return self._counters.statistics(
            refused_fetches=0 if self.moves is None else self.moves.waits.refused,
            slots=self._tier.num_slots,
            resident=self._tier.resident,
            pinned=self._tier.pinned,
            stored_objects=0 if self.moves is None else self.moves.storage.objects,
        )
