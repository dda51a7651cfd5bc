"""Free slots of a file store: of the slabs that are there, of new slabs, out of quarantine, or of
an evicted object."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from kvactors.actor.clock import now
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_steps import Growth
from kvactors.storage.backends.slab_threads import SlabThreads
from kvactors.storage.backends.slots import Slots
from kvactors.storage.catalog import Catalog
from kvactors.storage.messages import Outcome


class SlotSupply:
    """Hands out free slots, and keeps the catalog's capacity at the number of usable ones.

    Attributes:
        slots: which are free, read, or in quarantine.
        growth: adds slabs.
        capacity: objects at most, when no slot is in quarantine.
    """

    def __init__(self, files: SlabFiles, threads: SlabThreads, catalog: Catalog) -> None:
        self.slots = Slots()
        self.growth = Growth(files, self.slots, threads.workers)
        self.capacity = 0
        self._catalog = catalog

    def set_capacity(self, capacity: int) -> None:
        """The capacity is known once the store is open."""
        self.capacity = self.growth.capacity = self._catalog.capacity = capacity

    def quarantine(self, slot: int) -> None:
        """Put a slot in quarantine: it held a corrupt object, or did not return the data
        written to it."""
        self.slots.suspect(slot, now())
        self._fit()

    def _fit(self) -> None:
        self._catalog.capacity = max(1, self.capacity - self.slots.quarantined)

    def prepare(self, count: int) -> None:
        """A batch of `count` objects follows. If it would evict objects, slots in quarantine are
        tried again first."""
        short = self.slots.quarantined and len(self._catalog) + count > self._catalog.capacity
        if short and (self.slots.release(now()) or self.slots.release_first_offenders()):
            self._fit()

    def take_now(self) -> int | None:
        """Take a slot that is free already, None if there is none."""
        if self.slots.release(now()):
            self._fit()
        return self.slots.free.popleft() if self.slots.free else None

    async def take(self, squeeze: Callable[[], Awaitable[bool]]) -> tuple[int | None, Outcome]:
        """Take a free slot.

        Args:
            squeeze: evicts an object and frees its slot; False if there is none to evict.

        Returns:
            The slot and OK, or None and why there is none.
        """
        slots = self.slots
        while True:
            slot = self.take_now()
            if slot is not None:
                return slot, Outcome.OK
            outcome = await self.growth.more()
            if slots.free or outcome == Outcome.OK:
                continue  # other writes may have taken the slots of the new slab
            if outcome != Outcome.NO_SPACE:
                return None, outcome
            if slots.release_first_offenders():
                self._fit()
            elif not await squeeze():
                return None, outcome
