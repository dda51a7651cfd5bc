"""Slots of a file store: free, read, or in quarantine after a corrupt object. Pure state, changed
on the event loop only."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

PAUSE = 60.0
"""Seconds in quarantine after the first corrupt object of a slot, doubled with each further one."""

LONGEST = 86_400.0


class Slots:
    """free: not in use. suspects: the next object that is written there must be read back before it
    counts. freed: called when slots have become free."""

    def __init__(self, freed: Callable[[], None] = lambda: None) -> None:
        self.free: deque[int] = deque()
        self.suspects: set[int] = set()
        self._freed = freed
        self._erasing = 0  # slots whose entries are being erased, free afterwards
        self._readers: dict[int, int] = {}  # reads in flight, by slot
        self._leaving: set[int] = set()  # free once no read of them is in flight
        self._until: dict[int, float] = {}  # in quarantine
        self._strikes: Counter[int] = Counter()

    # -- use

    @contextmanager
    def reading(self, slots: Sequence[int]) -> Iterator[None]:
        """Reads of slots are in flight inside."""
        self.begin_reads(slots)
        try:
            yield
        finally:
            self.end_reads(slots)

    def begin_reads(self, slots: Iterable[int]) -> None:
        """Reads are in flight: the slots are not written."""
        readers = self._readers
        for slot in slots:
            readers[slot] = readers.get(slot, 0) + 1

    def end_reads(self, slots: Iterable[int]) -> None:
        """Reads have ended."""
        readers, leaving = self._readers, self._leaving
        for slot in slots:
            left = readers.pop(slot) - 1
            if left:
                readers[slot] = left
            elif slot in leaving:
                leaving.remove(slot)
                self.free.append(slot)
                self._freed()

    def take(self, count: int) -> list[int]:
        """Take free slots, at most `count`."""
        free = self.free
        return [free.popleft() for _ in range(min(count, len(free)))]

    def restart(self, count: int) -> None:
        """The slots are those of new files, all of them free. None is in use."""
        self.free = deque(range(count))
        for kept in (self.suspects, self._leaving, self._until, self._strikes):
            kept.clear()

    def add(self, slots: Iterable[int]) -> None:
        """New slots, which nothing has read yet."""
        self.free.extend(slots)

    def give(self, slots: Iterable[int]) -> None:
        """The slots hold no object any more: free now, or when their last reads end."""
        for slot in slots:
            if slot in self._readers:
                self._leaving.add(slot)
            else:
                self.free.append(slot)
        self._freed()

    @contextmanager
    def erasing(self, slots: Sequence[int]) -> Iterator[None]:
        """The entries of slots are erased inside. Afterwards the slots hold no object."""
        self._erasing += len(slots)
        try:
            yield
        finally:
            self._erasing -= len(slots)
            self.give(slots)

    @property
    def leaving(self) -> int:
        """Slots that will be free without an eviction: their objects are gone, and a read or the
        erasure of the entry has not ended."""
        return self._erasing + len(self._leaving)

    def retired(self) -> list[int]:
        """Slots that hold no object and are not free yet: read still, or in quarantine."""
        return [*self._leaving, *self._until]

    def first(self, slot: int | None) -> None:
        """If it is free, it is the next one to be taken."""
        if slot is not None and slot in self.free:
            self.free.remove(slot)
            self.free.appendleft(slot)

    # -- quarantine

    @property
    def quarantined(self) -> int:
        """Number of slots in quarantine."""
        return len(self._until)

    def suspect(self, slot: int, now: float) -> None:
        """Put a slot in quarantine: it held a corrupt object, or did not return the data written to
        it."""
        self._strikes[slot] += 1
        self._until[slot] = now + min(LONGEST, PAUSE * 2.0 ** min(20, self._strikes[slot] - 1))
        self.suspects.add(slot)

    def release(self, now: float) -> bool:
        """Free the slots whose quarantine has ended. Returns whether there were any."""
        return bool(self._until) and self._free_again(
            [slot for slot, until in self._until.items() if until <= now]
        )

    def release_first_offenders(self) -> bool:
        """Free the slots that held one corrupt object only, because slots run out. Returns whether
        there were any."""
        return self._free_again([slot for slot in self._until if self._strikes[slot] == 1])

    def _free_again(self, slots: list[int]) -> bool:
        for slot in slots:
            del self._until[slot]
        self.give(slots)
        return bool(slots)

    def passed(self, slot: int) -> None:
        """A suspect slot returned the data written to it."""
        self.suspects.discard(slot)
        del self._strikes[slot]
