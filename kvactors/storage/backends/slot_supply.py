"""Free slots of a file store: of the slabs that are there, of new slabs, out of quarantine, or of
an evicted object."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from kvactors.actor.clock import now
from kvactors.storage.backends.base import Expired
from kvactors.storage.backends.slab_files import SlabFiles
from kvactors.storage.backends.slab_steps import Growth
from kvactors.storage.backends.slab_threads import SlabThreads
from kvactors.storage.backends.slots import Slots
from kvactors.storage.catalog import Catalog
from kvactors.storage.messages import Outcome

DEADLINE_EVERY = 64
"""Objects of a batch that get their slots between two looks at its deadline."""

DEADLINE_CHECK = 0.05
"""Seconds between two looks at the deadline while a write waits for a slot."""


class SlotSupply:
    """Hands out free slots, and keeps the catalog's capacity at the number of usable ones.

    Attributes:
        slots: which are free, read, or in quarantine.
        growth: adds slabs.
        capacity: objects at most, when no slot is in quarantine.
    """

    def __init__(self, files: SlabFiles, threads: SlabThreads, catalog: Catalog) -> None:
        self.slots = Slots(self._wake)
        self.growth = Growth(files, self.slots, threads.workers)
        self.capacity = 0
        self._catalog = catalog
        self._waiting: set[asyncio.Future[None]] = set()  # writes without a slot

    def set_capacity(self, capacity: int) -> None:
        """The capacity is known once the store is open, and follows the space."""
        self.capacity = self.growth.capacity = capacity
        self._fit()

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

    def take_now(self, count: int) -> list[int]:
        """Take slots that are free already, at most `count`."""
        if self.slots.release(now()):
            self._fit()
        return self.slots.take(count)

    async def take_batch(
        self,
        taken: dict[int, int],
        outcomes: list[Outcome],
        squeeze: Callable[[], Awaitable[bool]],
        expired: Expired,
    ) -> None:
        """Take a slot for each object of a batch, until its deadline.

        Args:
            taken: receives the slots, by position in the batch.
            outcomes: of the batch. Receives why an object got no slot.
            squeeze: see `take`.
            expired: whether the deadline has passed.
        """
        for start in range(0, len(outcomes), DEADLINE_EVERY):
            if expired():
                return
            some = range(start, min(start + DEADLINE_EVERY, len(outcomes)))
            taken.update(zip(some, self.take_now(len(some)), strict=False))
            for i in some:
                if i not in taken:
                    slot, outcomes[i] = await self.take(squeeze, expired)
                    if slot is not None:
                        taken[i] = slot
        self.growth.ahead()

    async def take(
        self, squeeze: Callable[[], Awaitable[bool]], expired: Expired
    ) -> tuple[int | None, Outcome]:
        """Take a free slot.

        Args:
            squeeze: evicts an object and frees its slot; False if there is none to evict.
            expired: whether the deadline has passed.

        Returns:
            The slot and OK, or None and why there is none.
        """
        slots = self.slots
        while True:
            taken = self.take_now(1)
            if taken:
                return taken[0], Outcome.OK
            outcome = await self.growth.more()
            if slots.free or outcome == Outcome.OK:
                continue  # other writes may have taken the slots of the new slab
            if outcome != Outcome.NO_SPACE:
                return None, outcome
            if slots.leaving:  # within the capacity: nothing is evicted or refused
                if expired():
                    return None, Outcome.LATE
                await self._wait()
            elif slots.release_first_offenders():
                self._fit()
            elif not await squeeze():
                return None, outcome

    async def _wait(self) -> None:
        """Wait until slots have become free, or it is time to look at the deadline."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=DEADLINE_CHECK)
        finally:
            self._waiting.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
