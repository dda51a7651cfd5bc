"""Host slots by engine key: look-ups, stores and loads in flight, eviction. Pure state."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

from kvactors.cpu_evictor.slots import HostBlock, HostTier, SlotState
from kvactors.tier_cache.answers import CopiesInFlight, Lookup, StoreSlots

MISS, PENDING, HIT = Lookup

UNKNOWN = b""
"""The parent of a block whose parent is not known. Keys are never empty."""


class SlotTable:
    """The host tier of one `TierCache`, used by one thread.

    A key whose copy is in flight when the table is reset keeps its slot until the copy completes,
    and cannot be stored again before. So a completion always names one slot.

    Args:
        tier: slots and eviction order.
        keeps: whether a block that is chosen to be evicted stays. It is pinned then.

    Attributes:
        held: keys answered HIT since the last `end_step`. They are not evicted.
        awaited: fetched keys that were not answered HIT yet, with the time up to which they are not
            evicted. Without it two requests with more blocks than slots would evict each other's
            without end.
    """

    def __init__(
        self, tier: HostTier, keeps: Callable[[HostBlock], bool] = lambda _: False
    ) -> None:
        self.tier = tier
        self._keeps = keeps
        self.held: set[bytes] = set()
        self.awaited: dict[bytes, float] = {}
        self._blocks = tier.blocks
        self._named: set[bytes] = set()  # parents of the blocks, and of some that have left
        self._stores: dict[bytes, HostBlock] = {}  # copies to the host, in the order of begin
        self._loads: dict[bytes, tuple[HostBlock, int]] = {}  # block, and loads of it in flight
        self._steps = 0
        self._touches = 0
        self._planned: list[HostBlock] = []  # the next victims, the first one last
        self._planned_for: tuple[int, int, int] | None = None  # when they were chosen
        self._ahead = 1  # victims that are chosen at once
        self._full: tuple[int, int, int] | None = None  # when no single slot could be had

    def lookup(self, key: bytes) -> Lookup:
        """Whether a key is in a slot. A HIT is held until `end_step`."""
        block = self._blocks.get(key)
        if block is None:
            return MISS
        if block.arriving:
            return PENDING
        self.held.add(key)
        if self.awaited:
            self.awaited.pop(key, None)
        return HIT

    def end_step(self, now: float) -> None:
        """Release the blocks that were held for the engine's step."""
        self._steps += 1
        self._ahead = 1
        self.held.clear()
        while self.awaited:
            key, until = next(iter(self.awaited.items()))
            if until > now:
                break
            del self.awaited[key]

    # -- stores

    def prepare_store(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None] | None = None,
        most: int = sys.maxsize,
        spare: int = 0,
        stay: Sequence[bytes] = (),
    ) -> StoreSlots:
        """Take slots for the first keys that have none, as many as can be had.

        Args:
            keys: in the order of their path.
            parents: of each key, None where unknown; None if none is known. Keys that have a slot
                learn theirs too.
            most: slots at most.
            spare: slots that others wait for.
            stay: other keys that are not evicted.

        Returns:
            `waiting` are all keys that got no slot.
        """
        above = dict(zip(keys, parents, strict=True)) if parents else {}
        lacking = [key for key in dict.fromkeys(keys) if not self.is_taken(key)]
        count, evicted = self._make_room(min(most, len(lacking)), [*keys, *stay], spare)
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
        """Whether a key has a slot, or had one that a copy still uses."""
        return key in self._blocks or key in self._stores or key in self._loads

    def _make_room(
        self, count: int, keys: Sequence[bytes] = (), spare: int = 0
    ) -> tuple[int, list[bytes]]:
        """Evict blocks for the slots that are lacking.

        Args:
            count: slots.
            keys: not evicted.
            spare: slots that stay beside them, free or of blocks that can be evicted.

        Returns:
            The slots that can be had, at most `count`, and the evicted keys, children before
            parents.
        """
        free = self.tier.free
        lacking = count + spare - free
        if count <= 0 or lacking <= 0:
            return count, []
        if self._full is not None and self._full == self._moment:
            return 0, []  # every look-up of a step would search all slots in vain
        chosen = self._victims(lacking, keys)
        if not (chosen or keys):
            self._full = self._moment
        victims = [block for block in chosen if not self._keeps(block)]
        found = max(0, min(count, free + len(victims) - spare))
        del victims[max(0, found - free) :]
        for block in victims:
            self.tier.drop(block)
        return found, [block.hash for block in victims]

    def take_slot(self, key: bytes) -> tuple[HostBlock, list[bytes]] | None:
        """A slot for a key whose bytes come from storage, and the keys that were evicted for it.
        None if no slot can be had."""
        found, evicted = self._make_room(1)
        if not found:
            return None
        block = self.tier.add(key, UNKNOWN, SlotState.RESIDENT)
        if evicted:  # the new block is pinned, so the planned victims are still the next
            self._planned_for = self._order
        return block, evicted

    def _victims(self, count: int, keys: Sequence[bytes]) -> list[HostBlock]:
        """The next victims in the policy's order, at most `count`.

        A step that looks many stored keys up evicts one block for each. Each search passes all
        blocks that are held, so a search finds the victims of later look-ups too, twice as many as
        the search before.
        """
        if count > 1 or keys:
            return self.tier.victims(count, self.held.union(keys, self.awaited))
        last = self._planned[-1].hash if self._planned else b""
        if self._planned_for != self._order or not last or last in self.held:
            found = self.tier.victims(self._ahead, self.held.union(self.awaited))
            self._ahead = min(2 * self._ahead, self.tier.capacity)
            self._planned, self._planned_for = found[::-1], self._order
        return [self._planned.pop()] if self._planned else []

    @property
    def _order(self) -> tuple[int, int, int]:
        """While this stays the same, the next victims do, apart from keys that are answered HIT."""
        return self.tier.changes, self._touches, self._steps

    @property
    def _moment(self) -> tuple[int, int, int]:
        """While this stays the same, no block becomes evictable: until the end of the step more
        blocks are held, and none is released."""
        return self.tier.changes, self._steps, len(self.awaited)

    def complete_store(self, keys: Iterable[bytes], success: bool) -> list[HostBlock]:
        """Copies to the host have ended.

        Args:
            keys: of stores in flight, in any order.
            success: whether the bytes are in the slots.

        Returns:
            The blocks that can be read now, in the order in which their stores began.

        Raises:
            ValueError: no store of a key is in flight. Nothing changed.
        """
        ended = set(keys)
        self._check_in_flight(ended, self._stores, "store")
        many = len(ended) > 1
        ordered = [key for key in self._stores if key in ended] if many else list(ended)
        blocks = [self._stores.pop(key) for key in ordered]
        failed = frozenset() if success else frozenset(range(len(blocks)))
        return self.tier.land(blocks, failed)

    # -- loads

    def prepare_load(self, keys: Sequence[bytes]) -> list[int]:
        """Pin the slots of keys that were answered HIT.

        Raises:
            ValueError: a key is not in a slot, or its bytes are not there yet. Nothing changed.
        """
        blocks = [self._blocks.get(key) for key in keys]
        slots: list[int] = []
        for key, block in zip(keys, blocks, strict=True):
            if block is None or block.arriving:
                raise ValueError(
                    f"key {key.hex()} has no readable host slot: load only keys that lookup "
                    "answered HIT in this step"
                )
            slots.append(block.slot)
        for key in keys:
            block = self._blocks[key]
            self.tier.pin(block)
            self._loads[key] = (block, self._loads.get(key, (block, 0))[1] + 1)
        return slots

    def complete_load(self, keys: Iterable[bytes]) -> None:
        """Loads have ended, well or not: unpin their slots.

        Raises:
            ValueError: no load of a key is in flight. Nothing changed.
        """
        ended = Counter(keys)
        self._check_in_flight(ended, self._loads, "load")
        for key, ends in ended.items():
            if ends > self._loads[key][1]:
                raise ValueError(f"{ends} loads of key {key.hex()} end, and fewer are in flight")
        for key, ends in ended.items():
            block, count = self._loads[key]
            if count == ends:
                del self._loads[key]
            else:
                self._loads[key] = (block, count - ends)
            for _ in range(ends):
                self.tier.unpin(block)

    @staticmethod
    def _check_in_flight(keys: Iterable[bytes], in_flight: Container[bytes], what: str) -> None:
        unknown = [key for key in keys if key not in in_flight]
        if unknown:
            raise ValueError(f"no {what} of key {unknown[0].hex()} is in flight")

    # -- the rest

    def touch(self, keys: Sequence[bytes]) -> None:
        """Keys of a path were used, in the order of the path."""
        self._touches += 1
        self.tier.touch(reversed(keys))

    def reset(self) -> list[bytes]:
        """Forget every key. Slots of copies in flight are free when those complete.

        Returns:
            The keys that could be read, children before parents as far as that is known.
        """
        removed = children_first(block for block in self._blocks.values() if not block.arriving)
        self.tier.clear()
        self.held.clear()
        self.awaited.clear()
        return removed

    def copies_in_flight(self) -> CopiesInFlight:
        """The stores and loads that were begun and not completed."""
        loads = [key for key, (_, count) in self._loads.items() for _ in range(count)]
        return CopiesInFlight(tuple(self._stores), tuple(loads))

    @property
    def in_flight(self) -> int:
        """Keys with a store or load in flight."""
        return len(self._stores) + len(self._loads)

    def check(self) -> None:
        """AssertionError if slots, order and copies in flight disagree."""
        self.tier.check()


def children_first(blocks: Iterable[HostBlock]) -> list[bytes]:
    """Keys, each after its known descendants."""
    parents = {block.hash: block.parent for block in blocks}
    depths: dict[bytes, int] = {}
    for key in parents:
        path = []
        above = key
        while above in parents and above not in depths:
            path.append(above)
            above = parents[above]
        start = depths.get(above, 0) + 1
        depths.update((below, start + i) for i, below in enumerate(reversed(path)))
    return sorted(parents, key=lambda key: -depths[key])
