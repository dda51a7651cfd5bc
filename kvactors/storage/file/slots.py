"""Slots of a file store: which are free, read, erased or in quarantine, and where a write gets
one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvactors.actor.clock import now
from kvactors.storage.backend import Expired
from kvactors.storage.catalog import Catalog
from kvactors.storage.file.layout import SlabFiles
from kvactors.storage.messages import Outcome
from kvactors.threads import Workers

QUARANTINE_S = 60.0
"""Seconds in quarantine after a corrupt object of a slot."""

GROW_AGAIN_S = 10.0
"""Seconds after which a store on a full disk tries to grow again. Until then it evicts."""

DEADLINE_EVERY_OBJECTS = 64
"""Objects of a batch that get their slots between two looks at its deadline."""

DEADLINE_CHECK_S = 0.05
"""Seconds between two looks at the deadline while a write waits for a slot."""


class SlotSupply:
    """Hands out free slots, and keeps the catalog's capacity at the number of usable ones."""

    def __init__(self, files: SlabFiles, workers: Workers, catalog: Catalog) -> None:
        self.capacity = 0  # objects at most, when no slot is in quarantine; known once open
        self.free: deque[int] = deque()
        self.pause_until = 0.0  # until then no slab is added, because the disk was full
        self.refused = ""  # why the last slab could not be added
        self._files = files
        self._workers = workers
        self._catalog = catalog
        self._erasing = 0  # slots whose entries are being erased, free afterwards
        self._readers: dict[int, int] = {}  # reads in flight, by slot
        self._leaving: set[int] = set()  # free once no read of them is in flight
        self._until: dict[int, float] = {}  # in quarantine
        self._growing: asyncio.Future[Outcome] | None = None  # a slab is added, in a thread
        self._waiting: set[asyncio.Future[None]] = set()  # writes without a slot

    # -- use

    @contextmanager
    def reading(self, slots: Sequence[int]) -> Iterator[None]:
        """Reads of slots are in flight inside: the slots are not written."""
        readers = self._readers
        for slot in slots:
            readers[slot] = readers.get(slot, 0) + 1
        try:
            yield
        finally:
            for slot in slots:
                left = readers.pop(slot) - 1
                if left:
                    readers[slot] = left
                elif slot in self._leaving:
                    self._leaving.remove(slot)
                    self.give([slot])

    @contextmanager
    def erasing(self, slots: Sequence[int]) -> Iterator[None]:
        """The entries of slots are erased inside. Afterwards the slots hold no object."""
        self._erasing += len(slots)
        try:
            yield
        finally:
            self._erasing -= len(slots)
            self.give(slots)

    def give(self, slots: Iterable[int]) -> None:
        """The slots hold no object any more: free now, or when their last reads end."""
        for slot in slots:
            if slot in self._readers:
                self._leaving.add(slot)
            else:
                self.free.append(slot)
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def restart(self, count: int) -> None:
        """The slots are those of new files, all of them free. None is in use."""
        self.free = deque(range(count))
        for kept in (self._leaving, self._until):
            kept.clear()

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

    # -- quarantine, and the capacity without the slots there

    def set_capacity(self, capacity: int) -> None:
        self.capacity = capacity
        self._fit()

    def _fit(self) -> None:
        self._catalog.capacity = max(1, self.capacity - self.quarantined)

    @property
    def quarantined(self) -> int:
        return len(self._until)

    def quarantine(self, slot: int) -> None:
        """Put a slot in quarantine: it held a corrupt object."""
        self._until[slot] = now() + QUARANTINE_S
        self._fit()

    def release(self) -> None:
        """Free the slots whose quarantine has ended."""
        slots = [slot for slot, until in self._until.items() if until <= now()]
        for slot in slots:
            del self._until[slot]
        if slots:
            self.give(slots)
            self._fit()

    # -- slots for writes

    def take_now(self, count: int) -> list[int]:
        """Take slots that are free already, at most `count`."""
        self.release()
        return [self.free.popleft() for _ in range(min(count, len(self.free)))]

    async def take_batch(
        self,
        taken: dict[int, int],
        outcomes: list[Outcome],
        squeeze: Callable[[], Awaitable[bool]],
        expired: Expired,
    ) -> None:
        """Take a slot for each object of a batch, until its deadline: `taken` receives them by
        position, `outcomes` why an object got none."""
        for start in range(0, len(outcomes), DEADLINE_EVERY_OBJECTS):
            if expired():
                return
            some = range(start, min(start + DEADLINE_EVERY_OBJECTS, len(outcomes)))
            taken.update(zip(some, self.take_now(len(some)), strict=False))
            for i in some:
                if i not in taken:
                    slot, outcomes[i] = await self.take(squeeze, expired)
                    if slot is not None:
                        taken[i] = slot
        self._grow_ahead()

    async def take(
        self, squeeze: Callable[[], Awaitable[bool]], expired: Expired
    ) -> tuple[int | None, Outcome]:
        while True:
            taken = self.take_now(1)
            if taken:
                return taken[0], Outcome.OK
            outcome = await self.grow(expired)
            if self.free or outcome == Outcome.OK:
                continue  # other writes may have taken the slots of the new slab
            if outcome != Outcome.NO_SPACE:
                return None, outcome
            if self.leaving:  # within the capacity: nothing is evicted or refused
                if expired():
                    return None, Outcome.LATE
                await self._wait()
            elif not await squeeze():
                return None, outcome

    async def _wait(self) -> None:
        """Wait until slots have become free, or it is time to look at the deadline."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=DEADLINE_CHECK_S)
        finally:
            self._waiting.discard(waiter)

    # -- slabs that are added, up to the capacity
    #
    # The thread's call works on no memory that a caller lent, so a cancelled write leaves it alone:
    # a disk that hangs must not keep the loop from ending.

    async def grow(self, expired: Expired) -> Outcome:
        """One more slab, with all that wait for it: OK, NO_SPACE, UNAVAILABLE or LATE."""
        if now() < self.pause_until:
            return Outcome.NO_SPACE
        # Slots that wait for their readers, or are in quarantine, may ask for one slab more than
        # the capacity does.
        if self._growing is None and len(self._files.slabs) > self._wanted():
            return Outcome.NO_SPACE
        growing = self._growing or self._begin()
        while self._growing is growing:  # until the slots of the slab are free as well
            if expired():
                return Outcome.LATE
            await asyncio.wait([growing], timeout=DEADLINE_CHECK_S)
        return growing.result()

    def _grow_ahead(self) -> None:
        """Begin to add a slab if less than half of one is free: a batch that needs it then does not
        wait, while the disk has nothing to write."""
        enough = 2 * len(self.free) >= self._files.meta.slots_per_slab
        if enough or len(self._files.slabs) >= self._wanted() or now() < self.pause_until:
            return
        if self._growing is None:
            self._begin()

    def concern(self) -> str:
        """Why the store cannot grow to its capacity. Empty if it can."""
        return self.refused if len(self._files.slabs) < self._wanted() else ""

    def _wanted(self) -> int:
        return -(-self.capacity // self._files.meta.slots_per_slab)

    def _begin(self) -> asyncio.Future[Outcome]:
        growing = asyncio.wrap_future(self._workers.submit(self._files.grow))
        growing.add_done_callback(self._grown)
        self._growing = growing
        return growing

    def _grown(self, growing: asyncio.Future[Outcome]) -> None:
        self._growing = None
        if growing.exception() is not None:
            return  # raised by the writes that wait
        outcome, per_slab = growing.result(), self._files.meta.slots_per_slab
        self.refused = "" if outcome == Outcome.OK else self._files.trouble
        if outcome == Outcome.OK:
            slabs = len(self._files.slabs)
            self.give(range((slabs - 1) * per_slab, slabs * per_slab))
        elif outcome == Outcome.NO_SPACE:
            self.pause_until = now() + GROW_AGAIN_S
