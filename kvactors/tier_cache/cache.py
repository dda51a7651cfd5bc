"""The key-addressed, synchronous face of the tiers below an engine's device blocks."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvactors.cpu_evictor.policy import POLICIES
from kvactors.cpu_evictor.slots import HostTier
from kvactors.errors import CacheClosed, ConfigError, WrongThread
from kvactors.tier_cache.answers import Lookup, StoreSlots, TierEvent
from kvactors.tier_cache.event_log import EventLog
from kvactors.tier_cache.settings import TierConfig, checked_config
from kvactors.tier_cache.slot_memory import SlotMemory
from kvactors.tier_cache.slot_table import SlotTable
from kvactors.types import Reason, Tier

NONE: int = 0
CLOSED: int = -1
"""In the place of the owner's thread: before the first call, and after `shutdown`."""

log = logging.getLogger("kvactors")


class TierCache:
    """Host slots and what is below them, for an engine that owns device blocks and block hashes.

    The engine names blocks by keys: its opaque bytes, for instance a block hash and the number of
    a layer group. Every call answers at once from memory, without waiting for a copy or for I/O.

    The thread of the first call owns the cache, until `adopt` names another one. In other threads
    `complete_store`, `complete_load`, `touch`, `end_step` and `reset` are handed over and take
    effect at the owner's next call. The calls that answer raise WrongThread there.

    Args:
        config: settings.
        memory: the host slots. Its slots and bytes must be those of the config.
    """

    def __init__(self, config: TierConfig, memory: SlotMemory) -> None:
        if (memory.num_slots, memory.block_bytes) != (config.num_slots, config.block_bytes):
            raise ConfigError(
                f"memory of {memory.num_slots} slots of {memory.block_bytes} bytes, and the config "
                f"has {config.num_slots} of {config.block_bytes}"
            )
        self.config = config
        self.memory = memory
        policy = POLICIES[config.policy]()
        self._slots = SlotTable(HostTier(config.num_slots, config.num_slots, policy=policy))
        self._events = EventLog([Tier[name.upper()] for name in config.events])
        self._owner: int = NONE  # a thread
        self._handed: deque[Callable[[], object]] = deque()  # calls of other threads

    # -- threads

    def adopt(self) -> None:
        """Make the calling thread the owner. The former owner makes no more calls.

        Raises:
            CacheClosed: the cache is shut down.
        """
        if self._owner == CLOSED:
            raise CacheClosed("the cache is shut down")
        self._owner = threading.get_ident()

    def _enter(self) -> None:
        """Begin a call of the owner.

        Raises:
            WrongThread: another thread owns the cache.
            CacheClosed: the cache is shut down.
        """
        if threading.get_ident() != self._owner:
            self._check_owner()
        if self._handed:
            self._catch_up()

    def _check_owner(self) -> None:
        if self._owner not in (NONE, CLOSED):
            raise WrongThread("another thread owns this cache: call adopt in this one first")
        self.adopt()

    def _catch_up(self) -> None:
        """Make the calls that other threads have handed over."""
        while self._handed:
            call = self._handed.popleft()
            try:
                call()
            except ValueError as error:  # a fault of the other thread, whose call has returned
                log.error("call of another thread refused: %s", error)

    def _hands_over(self, call: Callable[[], object]) -> bool:
        """Whether a call without an answer is not the owner's. It waits for the owner then."""
        if threading.get_ident() == self._owner or self._owner == NONE:
            return False
        if self._owner != CLOSED:
            self._handed.append(call)
        return True

    # -- look-up

    def lookup(self, key: bytes) -> Lookup:
        """Where a key is: HIT, PENDING or MISS.

        Raises:
            WrongThread: another thread owns the cache.
        """
        self._enter()
        return self._slots.lookup(key)

    def end_step(self) -> None:
        """A step of the engine's scheduler has ended: keys answered HIT may be evicted, unless a
        load of them is in flight."""
        if self._hands_over(self.end_step):
            return
        self._enter()
        self._slots.end_step()

    def touch(self, keys: Sequence[bytes]) -> None:
        """Keys of a path were used, in the order of the path. Keys without a slot are ignored."""
        if self._hands_over(partial(self.touch, list(keys))):
            return
        self._enter()
        self._slots.touch(keys)

    # -- copies from the device to host slots

    def prepare_store(
        self, keys: Sequence[bytes], parents: Sequence[bytes | None] | None = None
    ) -> StoreSlots | None:
        """Take host slots for keys, evicting others where needed.

        Args:
            keys: in the order of their path.
            parents: the key before each on its path, None where unknown; None if none is known.
                A key is evicted before its parent.

        Returns:
            The keys to copy and their slots; None if not enough slots can be had now. Nothing
            changed then.

        Raises:
            ValueError: a key is no bytes or empty, or there are not as many parents as keys.
            WrongThread: another thread owns the cache.
        """
        self._enter()
        keys = checked_keys(keys)
        if parents is not None and len(parents) != len(keys):
            raise ValueError(f"{len(parents)} parents of {len(keys)} keys")
        found = self._slots.prepare_store(keys, parents)
        if found is not None:
            self._events.record(Tier.HOST, False, found.evicted, Reason.CPU_EVICTION)
        return found

    def complete_store(self, keys: Iterable[bytes], success: bool = True) -> None:
        """Copies to host slots have ended.

        Args:
            keys: that `prepare_store` gave slots for, in any order.
            success: whether the bytes are in the slots. If not, the slots are free again.

        Raises:
            ValueError: no store of a key is in flight. Nothing changed.
        """
        if self._hands_over(partial(self.complete_store, list(keys), success)):
            return
        self._enter()
        landed = self._slots.complete_store(keys, success)
        self._events.record(Tier.HOST, True, [block.hash for block in landed], Reason.OFFLOAD)

    # -- copies from host slots to the device

    def prepare_load(self, keys: Sequence[bytes]) -> list[int]:
        """Pin the slots of keys that `lookup` answered HIT, until `complete_load`.

        Returns:
            One slot for each key.

        Raises:
            ValueError: a key has no readable slot. Nothing changed.
            WrongThread: another thread owns the cache.
        """
        self._enter()
        return self._slots.prepare_load(checked_keys(keys))

    def complete_load(self, keys: Iterable[bytes]) -> None:
        """Copies from host slots have ended, well or not.

        Raises:
            ValueError: no load of a key is in flight. Nothing changed.
        """
        if self._hands_over(partial(self.complete_load, list(keys))):
            return
        self._enter()
        self._slots.complete_load(keys)

    # -- the rest

    def reset(self) -> None:
        """Forget every key. Slots of copies in flight are free when those complete."""
        if self._hands_over(self.reset):
            return
        self._enter()
        self._events.record(Tier.HOST, False, self._slots.reset(), Reason.CLEAR)

    def take_events(self) -> list[TierEvent]:
        """Changes of the tiers in `TierConfig.events` since the last call."""
        self._enter()
        return self._events.take()

    def has_pending_work(self) -> bool:
        """Whether copies are in flight, or calls of other threads wait."""
        return self._slots.in_flight > 0 or len(self._handed) > 0

    def shutdown(self) -> None:
        """Let go of the memory, from any thread, any number of times. Later calls that would answer
        raise CacheClosed, the others do nothing."""
        self._owner = CLOSED
        self._handed.clear()
        self.memory.close()

    def check(self) -> None:
        """AssertionError if the cache's own facts disagree, for tests."""
        self._slots.check()


def checked_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Keys as a list.

    Raises:
        ValueError: one is no bytes, or empty.
    """
    found: list[Any] = list(keys)
    for key in found:
        if not isinstance(key, bytes) or not key:
            raise ValueError(f"a key must be bytes, and not empty: {key!r}")
    return found


def open_tiers(
    config: TierConfig | Mapping[str, Any], *, memory: Any = None, stride: int | None = None
) -> TierCache:
    """Open the tiers below an engine's device blocks.

    Args:
        config: settings, as a `TierConfig` or a mapping.
        memory: writable, contiguous memory for the host slots, for instance a shared mapping of the
            engine. None: new memory.
        stride: bytes from one slot to the next in `memory`. None: `block_bytes`.

    Raises:
        ConfigError: a setting is unknown, malformed or out of range.
        LayoutError: the memory does not fit.
    """
    checked = checked_config(config)
    return TierCache(checked, SlotMemory(checked.num_slots, checked.block_bytes, memory, stride))
