"""The pure state of the host tier: which block is in which slot, who pins it, and who goes next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator
from enum import Enum

from kvactors.lineage import Lineage

STEP = 512
"""Entries that a step of a check looks at."""


class SlotState(Enum):
    """Where an entry stands."""

    RESIDENT = "resident"  # counts against the capacity
    # going back to the device (exclusive tiers): out of the capacity, slot still in use
    LEAVING = "leaving"
    TRANSIT = "transit"  # passing through: being written to storage, or staged on its way


class HostBlock:
    """A block in a slot. pins: copies and writes that use the slot now. arriving: its bytes are not
    there yet. told: the notifier believes it resident. hinted: the index was told that it came by
    itself. handed: copied to the device, so the index will discard it. dropped: forgotten; the slot
    is free as soon as nobody uses it. lineage: for the store, if it keeps it."""

    __slots__ = (
        "arriving",
        "dropped",
        "handed",
        "hinted",
        "key",
        "lineage",
        "parent",
        "pins",
        "place",
        "slot",
        "told",
    )

    def __init__(
        self, key: bytes, parent: bytes, slot: int, place: SlotState, lineage: Lineage | None = None
    ) -> None:
        self.key = key
        self.lineage = lineage
        self.parent = parent
        self.slot = slot
        self.place = place
        self.pins = 0
        self.arriving = False
        self.told = False
        self.hinted = False
        self.handed = False
        self.dropped = False


class HostTier:
    """At most `capacity` resident blocks in `num_slots` slots; the slots beyond are for blocks on
    their way through. in_use: slots that are not handed out as long as they are in it
    (`Arena.in_use`).

    Order is that of use, and whoever adds or touches several blocks of a path does so deepest
    first: so a parent is always younger than its children, and the oldest block is a leaf. A block
    with resident children is never a victim, whatever the order.
    """

    def __init__(self, capacity: int, num_slots: int, in_use: Container[int] = ()) -> None:
        if not 0 <= capacity <= num_slots:
            raise ValueError(f"a capacity of {capacity} blocks in {num_slots} slots")
        self.capacity = capacity
        self.num_slots = num_slots
        self.entries: dict[bytes, HostBlock] = {}
        self.lru: OrderedDict[bytes, HostBlock] = OrderedDict()
        self._in_use = in_use
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in in_use]
        self._withheld = [slot for slot in range(num_slots) if slot in in_use]
        self._children: Counter[bytes] = Counter()
        self._ghosts: set[HostBlock] = set()  # forgotten, slot still in use
        self.generation = 0  # how often everything was forgotten
        self.changes = 0  # calls that changed something
        self._pinned = self._handed = 0

    @property
    def free(self) -> int:
        """Slots that nothing uses."""
        if self._withheld:
            ended = [slot for slot in self._withheld if slot not in self._in_use]
            self._withheld = [slot for slot in self._withheld if slot in self._in_use]
            self._free += ended
            self.changes += bool(ended)
        return len(self._free)

    def _give(self, slot: int) -> None:
        (self._withheld if slot in self._in_use else self._free).append(slot)

    @property
    def resident(self) -> int:
        """Blocks that count against the capacity."""
        return len(self.lru)

    def usable(self, key: bytes) -> HostBlock | None:
        """The entry from whose slot this block can be read now."""
        entry = self.entries.get(key)
        return entry if entry is not None and not entry.arriving else None

    def keys(self) -> list[bytes]:
        """Hashes of the blocks that count as resident for indexes: residents whose bytes are there,
        and blocks on their way to storage or to the device that have been reported resident and not
        gone."""
        return list(self.names())

    def names(self) -> Iterator[bytes]:
        """The same one by one. RuntimeError if a block came or went since the first was taken."""
        return (
            key
            for key, entry in self.entries.items()
            if not entry.arriving and (entry.told or entry.place is SlotState.RESIDENT)
        )

    def add(
        self, key: bytes, parent: bytes, place: SlotState, lineage: Lineage | None = None
    ) -> HostBlock:
        """A new entry in a free slot, as most recently used, arriving and pinned. The caller has
        checked `free`."""
        if key in self.entries:
            raise RuntimeError("a block is given a second slot")
        self.changes += 1
        self._pinned += 1
        entry = HostBlock(key, parent, self._free.pop(), place, lineage)
        entry.arriving = True
        entry.pins = 1
        self.entries[key] = entry
        if place is SlotState.RESIDENT:
            self._enter(entry)
        return entry

    def victims(self, count: int, protected: Iterable[bytes] = ()) -> list[HostBlock]:
        """Up to `count` entries to evict, least recently used first; not pinned, not protected, no
        resident children. Unchanged."""
        if count <= 0:
            return []
        spare = set(protected)
        chosen: list[HostBlock] = []
        gone: Counter[bytes] = Counter()
        for key, entry in self.lru.items():
            if entry.pins or key in spare or self._children[key] > gone[key]:
                continue
            chosen.append(entry)
            gone[entry.parent] += 1
            if len(chosen) == count:
                break
        return chosen

    def touch(self, keys: Iterable[bytes]) -> None:
        """These were used, in this order."""
        for key in keys:
            if key in self.lru:
                self.lru.move_to_end(key)

    def move(self, entry: HostBlock, place: SlotState) -> None:
        """Change where an entry stands; a resident one comes in as most recently used."""
        if entry.place is SlotState.RESIDENT and place is not SlotState.RESIDENT:
            self._exit(entry)
        elif place is SlotState.RESIDENT and entry.place is not SlotState.RESIDENT:
            self._enter(entry)
            self._handed -= entry.handed
            entry.handed = False
        self.changes += 1
        entry.place = place

    def pin(self, entry: HostBlock) -> None:
        """Its slot is in use once more."""
        self.changes += 1
        self._pinned += not entry.pins
        entry.pins += 1

    def unpin(self, entry: HostBlock) -> None:
        """Its slot is in use once less; a dropped entry's slot is free with the last use."""
        if not entry.pins:
            raise RuntimeError("a slot that nothing uses is given back")
        self.changes += 1
        entry.pins -= 1
        self._pinned -= not entry.pins
        if entry.dropped and not entry.pins:
            self._ghosts.discard(entry)
            self._give(entry.slot)

    def drop(self, entry: HostBlock) -> None:
        """Forget an entry; its slot is free at once, or with its last use."""
        if entry.dropped:
            return
        self.changes += 1
        self._handed -= entry.handed
        entry.dropped, entry.handed = True, False
        if entry.place is SlotState.RESIDENT:
            self._exit(entry)
        del self.entries[entry.key]
        if entry.pins:
            self._ghosts.add(entry)
        else:
            self._give(entry.slot)

    def clear(self) -> None:
        """Forget everything."""
        self.generation += 1
        for entry in list(self.entries.values()):
            self.drop(entry)

    def hand(self, entry: HostBlock) -> None:
        """The device holds this block; the index is about to discard it here."""
        if not (entry.dropped or entry.handed):
            self._handed += 1
            entry.handed = True

    @property
    def handed(self) -> int:
        """Slots whose blocks the device holds, and which the index has not discarded yet."""
        return self._handed

    @property
    def pinned(self) -> int:
        """Slots in use by a copy or a write."""
        return self._pinned

    @property
    def passing(self) -> int:
        """Slots whose blocks are on their way to the device or to storage; those that wait for the
        index's Discard are not counted."""
        return len(self.entries) - len(self.lru) - self._handed

    def check(self) -> None:
        """AssertionError if slots, order and counts disagree."""
        for _ in self.check_steps():
            pass

    def check_steps(self) -> Iterator[None]:
        """`check` in steps of about a millisecond, between which anything may happen. What concerns
        an entry alone is always looked at; sums only if nothing has changed since the check
        began."""
        changes, used, pinned, handed = self.changes, bytearray(self.num_slots), 0, 0
        children: Counter[bytes] = Counter()
        entries = [*self.entries.values(), *self._ghosts]
        for start in range(0, len(entries), STEP):
            for entry in entries[start : start + STEP]:
                current = not entry.dropped
                assert not current or self.entries.get(entry.key) is entry, (
                    "an entry is not found by its key"
                )
                assert (self.lru.get(entry.key) is entry) == (
                    current and entry.place is SlotState.RESIDENT
                ), "order and entries disagree"
                assert current or entry.pins or changes != self.changes, (
                    "a dropped entry keeps its slot without a use"
                )
                used[entry.slot] += used[entry.slot] < 2
                pinned += entry.pins > 0
                handed += entry.handed
                if current and entry.place is SlotState.RESIDENT:
                    children[entry.parent] += 1
            yield
        assert len(self.lru) <= self.capacity, "more residents than capacity"
        if changes != self.changes:
            return
        unused = self._free + self._withheld
        for start in range(0, len(unused), STEP):
            for slot in unused[start : start + STEP]:
                used[slot] += used[slot] < 2
            yield
            if changes != self.changes:
                return
        assert used.count(1) == self.num_slots, "slots lost or given twice"
        assert (pinned, handed) == (self._pinned, self._handed), "counts of slots in use disagree"
        assert len(children) == len(self._children), "child counts disagree"
        for start in range(0, len(parents := list(children)), STEP):
            if changes != self.changes:
                return
            assert all(
                children[key] == self._children[key] for key in parents[start : start + STEP]
            ), "child counts disagree"
            yield

    def _enter(self, entry: HostBlock) -> None:
        self.lru[entry.key] = entry
        self._children[entry.parent] += 1

    def _exit(self, entry: HostBlock) -> None:
        del self.lru[entry.key]
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
