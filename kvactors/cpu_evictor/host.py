"""The pure state of the host tier: which block is in which slot, who pins it, and who goes next."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import Enum


class Place(Enum):
    """Where an entry stands."""

    RESIDENT = "resident"  # counts against the capacity
    LEAVING = "leaving"  # going back to the device (exclusive tiers): out of the capacity, slot still in use
    TRANSIT = "transit"  # passing through: being written to storage, or staged on its way


class Entry:
    """A block in a slot. pins: copies and writes that use the slot now. arriving: its bytes are not there yet. told: the notifier
    believes it resident. hinted: the index was told that it came by itself. handed: copied to the device, so the index will
    discard it. dropped: forgotten; the slot is free as soon as nobody uses it."""

    __slots__ = ("arriving", "dropped", "handed", "hinted", "key", "parent", "pins", "place", "slot", "told")

    def __init__(self, key: bytes, parent: bytes, slot: int, place: Place) -> None:
        self.key = key
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
    """At most `capacity` resident blocks in `num_slots` slots; the slots beyond are for blocks on their way through.

    Order is that of use, and whoever adds or touches several blocks of a path does so deepest first: so a parent is always younger
    than its children, and the oldest block is a leaf. A block with resident children is never a victim, whatever the order.
    """

    def __init__(self, capacity: int, num_slots: int) -> None:
        assert 0 <= capacity <= num_slots or not capacity
        self.capacity = capacity
        self.num_slots = num_slots
        self.entries: dict[bytes, Entry] = {}
        self.lru: OrderedDict[bytes, Entry] = OrderedDict()
        self._free = list(range(num_slots - 1, -1, -1))
        self._children: Counter[bytes] = Counter()
        self._ghosts: set[Entry] = set()  # forgotten, slot still in use
        self.generation = 0  # how often everything was forgotten

    @property
    def free(self) -> int:
        """Slots nobody uses."""
        return len(self._free)

    @property
    def resident(self) -> int:
        """Blocks that count against the capacity."""
        return len(self.lru)

    def usable(self, key: bytes) -> Entry | None:
        """The entry from whose slot this block can be read now."""
        entry = self.entries.get(key)
        return entry if entry is not None and not entry.arriving else None

    def keys(self) -> list[bytes]:
        """Names of resident blocks whose bytes are there."""
        return [key for key, entry in self.lru.items() if not entry.arriving]

    def add(self, key: bytes, parent: bytes, place: Place) -> Entry:
        """A new entry in a free slot, as most recently used, arriving and pinned. The caller has checked `free`."""
        assert key not in self.entries
        entry = Entry(key, parent, self._free.pop(), place)
        entry.arriving = True
        entry.pins = 1
        self.entries[key] = entry
        if place is Place.RESIDENT:
            self._enter(entry)
        return entry

    def victims(self, count: int, protected: Iterable[bytes] = ()) -> list[Entry]:
        """Up to `count` entries to evict, least recently used first; not pinned, not protected, no resident children. Unchanged."""
        if count <= 0:
            return []
        spare = set(protected)
        chosen: list[Entry] = []
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

    def move(self, entry: Entry, place: Place) -> None:
        """Change where an entry stands; a resident one comes in as most recently used."""
        if entry.place is Place.RESIDENT and place is not Place.RESIDENT:
            self._exit(entry)
        elif place is Place.RESIDENT and entry.place is not Place.RESIDENT:
            self._enter(entry)
            entry.handed = False
        entry.place = place

    def pin(self, entry: Entry) -> None:
        """Its slot is in use once more."""
        entry.pins += 1

    def unpin(self, entry: Entry) -> None:
        """Its slot is in use once less; a dropped entry's slot is free with the last use."""
        entry.pins -= 1
        assert entry.pins >= 0
        if entry.dropped and not entry.pins:
            self._ghosts.discard(entry)
            self._free.append(entry.slot)

    def drop(self, entry: Entry) -> None:
        """Forget an entry; its slot is free at once, or with its last use."""
        if entry.dropped:
            return
        entry.dropped = True
        if entry.place is Place.RESIDENT:
            self._exit(entry)
        del self.entries[entry.key]
        if entry.pins:
            self._ghosts.add(entry)
        else:
            self._free.append(entry.slot)

    def clear(self) -> None:
        """Forget everything."""
        self.generation += 1
        for entry in list(self.entries.values()):
            self.drop(entry)

    def check(self) -> None:
        """AssertionError if slots, order and counts disagree."""
        used = [entry.slot for entry in self.entries.values()] + [ghost.slot for ghost in self._ghosts]
        assert sorted(used + self._free) == list(range(self.num_slots)), "slots lost or given twice"
        assert len(self.lru) <= self.capacity, "more residents than capacity"
        assert set(self.lru) == {k for k, e in self.entries.items() if e.place is Place.RESIDENT}, "order and entries disagree"
        children = Counter(entry.parent for entry in self.lru.values())
        assert +self._children == +children, "child counts disagree"

    def handed(self) -> int:
        """Slots whose blocks the device holds, and which the index has not discarded yet."""
        return sum(1 for entry in self.entries.values() if entry.handed)

    def pinned(self) -> int:
        """Slots in use by a copy or a write."""
        return sum(1 for entry in self.entries.values() if entry.pins) + len(self._ghosts)

    def _enter(self, entry: Entry) -> None:
        self.lru[entry.key] = entry
        self._children[entry.parent] += 1

    def _exit(self, entry: Entry) -> None:
        del self.lru[entry.key]
        self._children[entry.parent] -= 1
        if not self._children[entry.parent]:
            del self._children[entry.parent]
