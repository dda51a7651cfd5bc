"""Stores that one process owns, over a medium that keeps their objects."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Container, Iterable, Sequence
from functools import partial
from typing import Protocol

from kvactors.errors import StoreError
from kvactors.storage.backend import Backend, Expired, ReadReport, StoreCounters, WriteReport
from kvactors.storage.catalog import BatchAdmission, OwnedInventory, salts_of_batch
from kvactors.storage.messages import Outcome

FORGOTTEN_PART = 1024
"""Objects of a salt that are deleted before other tasks may run."""


class Medium(Protocol):
    """The storage of a store's objects: memory, or files."""

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """Read one object into `into` (block_bytes long): OK, MISS, CORRUPT or UNAVAILABLE. If not
        OK, the contents of `into` are undefined. When the call has ended, cancelled or not, `into`
        is not written any more."""

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """Write one object, whole or not at all: OK, NO_SPACE or UNAVAILABLE. When the call has
        ended, `data` is not read any more."""

    async def seal(self, keys: Sequence[bytes]) -> Outcome:
        """Make saved payloads readable objects, all or none: OK, NO_SPACE or UNAVAILABLE."""

    def abandon(self, keys: Iterable[bytes]) -> None:
        """Give up payloads that were saved and will not be sealed (a batch was cancelled)."""

    async def erase(self, keys: Sequence[bytes]) -> Outcome | None:
        """Delete objects that the catalog does not have any more. UNAVAILABLE or NO_SPACE if a
        later process may find them."""

    def take_evicted(self) -> list[bytes]:
        """Keys that the medium evicted because it ran out of space, since the last call."""

    def present(self, key: bytes) -> bool:
        """Whether an object can be read now, even if a read did not find it: it may have been
        written since."""

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Await the coroutines that `work` makes, as many concurrently as suits the medium."""


class Groups(Protocol):
    """A medium that moves several objects in one call, which costs less than a call for each.
    Objects that are not begun before the deadline are LATE."""

    async def load_group(
        self, keys: Sequence[bytes], into: Sequence[memoryview], expired: Expired
    ) -> Sequence[Outcome]:
        """Read objects. Each outcome is that of `Medium.load`."""

    async def save_group(
        self, keys: Sequence[bytes], data: Sequence[memoryview], expired: Expired
    ) -> Sequence[Outcome]:
        """Write objects. Each outcome is that of `Medium.save`."""


class OwnedBatches:
    """Runs batches. Keys change hands synchronously: admission and removal take effect before
    anything else runs on the loop."""

    def __init__(
        self,
        medium: Medium,
        inventory: OwnedInventory,
        counters: StoreCounters,
        block_bytes: int,
        groups: Groups | None = None,
    ) -> None:
        """block_bytes: of an object. groups: moves objects in place of `medium`."""
        self._medium = medium
        self._groups = groups
        self._block_bytes = block_bytes
        self._inventory = inventory
        self._catalog = inventory.catalog
        self._counters = counters
        inventory.keeps_salts = inventory.answerable
        counters.shares = inventory.catalog.shares
        self._unerased: set[bytes] = set()  # of clears that have not completed

    def probe(self, keys: Sequence[bytes]) -> int:
        """See `Backend.probe`."""
        return self._inventory.readable_run(keys)

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        unfit = unfit_views(views, len(keys), self._block_bytes, writable=True)

        async def one(i: int) -> None:
            if not expired():
                outcomes[i] = await self._medium.load(keys[i], views[i])

        fit = [i for i in range(len(keys)) if i not in unfit]
        for i in unfit:
            outcomes[i] = Outcome.REFUSED
        if self._groups is None:
            await self._medium.each([partial(one, i) for i in fit])
        elif fit and not expired():
            found = await self._groups.load_group(
                [keys[i] for i in fit], [views[i] for i in fit], expired
            )
            for i, outcome in zip(fit, found, strict=True):
                outcomes[i] = outcome
        results = list(zip(keys, outcomes, strict=True))
        corrupt = [key for key, outcome in results if outcome == Outcome.CORRUPT]
        missing = [
            key
            for key, outcome in results
            if outcome == Outcome.MISS and not self._medium.present(key)
        ]
        pending = self._inventory.pending
        gone = self._catalog.remove(key for key in (*corrupt, *missing) if key not in pending)
        await self._medium.erase([key for key in gone if key not in self._catalog])
        return ReadReport(bytes(outcomes), gone)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`."""
        pending = self._inventory.pending
        unfit = unfit_views(views, len(keys), self._block_bytes, writable=False)
        fitting = [key for i, key in enumerate(keys) if i not in unfit and key not in pending]
        admission = self._catalog.admit(fitting, salts_of_batch())
        self._counters.evicted += len(admission.evicted)
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        fresh = set(admission.fresh)
        pending |= fresh
        try:
            await self._medium.erase(admission.evicted)
            await self._save(keys, views, expired, admission, outcomes, unfit)
            await self._seal(keys, fresh, outcomes)
        except BaseException:
            # Saved or not, no object is certain to be sealed.
            outcomes[:] = bytes([Outcome.UNAVAILABLE]) * len(keys)
            raise
        finally:
            self._medium.abandon(fresh)
            pending -= fresh
            failed = {
                key
                for i, (key, outcome) in enumerate(zip(keys, outcomes, strict=True))
                if outcome != Outcome.OK and i not in unfit
            }
            self._catalog.remove(fresh & failed)
        return WriteReport(bytes(outcomes), admission.evicted + self._medium.take_evicted())

    async def _save(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        expired: Expired,
        admission: BatchAdmission,
        outcomes: bytearray,
        unfit: Container[int],
    ) -> None:
        fresh, existing = set(admission.fresh), set(admission.existing)
        refused = set(admission.refused)
        chosen: list[int] = []
        for i, key in enumerate(keys):
            if i in unfit or key in refused:
                outcomes[i] = Outcome.REFUSED
            elif key in existing:
                outcomes[i] = Outcome.EXISTS
            elif key in fresh:
                chosen.append(i)

        async def one(i: int) -> None:
            if not expired():
                outcomes[i] = await self._medium.save(keys[i], views[i])

        if self._groups is None:
            await self._medium.each([partial(one, i) for i in chosen])
        elif chosen and not expired():
            found = await self._groups.save_group(
                [keys[i] for i in chosen], [views[i] for i in chosen], expired
            )
            for i, outcome in zip(chosen, found, strict=True):
                outcomes[i] = outcome

    async def _seal(self, keys: Sequence[bytes], fresh: set[bytes], outcomes: bytearray) -> None:
        saved = [i for i, key in enumerate(keys) if key in fresh and outcomes[i] == Outcome.OK]
        # The others were evicted by another batch since, or cleared.
        wanted = [i for i in saved if keys[i] in self._catalog]
        for i in saved:
            outcomes[i] = Outcome.REFUSED
        outcome = await self._medium.seal([keys[i] for i in wanted]) if wanted else Outcome.REFUSED
        for i in wanted:
            outcomes[i] = outcome if keys[i] in self._catalog else Outcome.REFUSED
        await self._medium.erase([keys[i] for i in saved if keys[i] not in self._catalog])

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`. An object that is being written stays. The object of a key that was
        taken before, and is therefore not in the catalog, is deleted too."""
        pending = self._inventory.pending
        self._catalog.remove(key for key in keys if key not in pending)
        await self._medium.erase([key for key in keys if key not in self._catalog])

    async def forget(self, salt: int) -> int:
        """See `Backend.forget`."""
        catalog = self._catalog
        while keys := catalog.remove(catalog.shares.first(salt, FORGOTTEN_PART)):
            if await self._medium.erase(keys) in (Outcome.NO_SPACE, Outcome.UNAVAILABLE):
                raise StoreError("the objects of a salt could not be deleted")
            await asyncio.sleep(0)
        return len(catalog) - catalog.shares.counted

    async def clear(self) -> None:
        """Delete every object. For media that do not outlive the process, where erasing cannot
        fail."""
        self._unerased.update(self._catalog.keys())
        self._catalog.clear()
        await self._medium.erase([key for key in self._unerased if key not in self._catalog])
        self._unerased.clear()


# -- one object at a time


SLICE = 0.0005
"""Seconds of a batch after which other tasks run."""


async def one_by_one(work: Sequence[Callable[[], Awaitable[None]]]) -> None:
    """Await the coroutines that `work` makes, one after another, at most SLICE seconds at a
    time."""
    time = asyncio.get_running_loop().time
    until = time() + SLICE
    for item in work:
        await item()
        if time() > until:
            await asyncio.sleep(0)
            until = time() + SLICE


class OwnedBackend(Backend):
    """Base of the stores that one process owns. Implement `load`, `save` and `erase` (contracts:
    see `Medium`). A catalog of the keys, in order of use, evicts within the capacity (objects at
    most, 0 for no limit).

    Attributes:
        answerable: False for a store whose objects other processes decide about: its keys are
            not listed.
        catalog: every key, those of `pending` included.
        pending: keys whose objects are being written.
    """

    exclusive = True
    answerable = True

    def __init__(self, digest: bytes, block_bytes: int, capacity: int = 0) -> None:
        inventory = OwnedInventory(capacity, answerable=self.answerable)
        super().__init__(digest, block_bytes, inventory)
        self.catalog, self.pending = inventory.catalog, inventory.pending
        self._batches = OwnedBatches(self, inventory, self.counters, block_bytes)

    @abstractmethod
    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """See `Medium.load`."""

    @abstractmethod
    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """See `Medium.save`."""

    @abstractmethod
    async def erase(self, keys: Sequence[bytes]) -> None:
        """See `Medium.erase`."""

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """See `Medium.each`. By default one after another."""
        await one_by_one(work)

    async def seal(self, keys: Sequence[bytes]) -> Outcome:
        """See `Medium.seal`."""
        return Outcome.OK

    def abandon(self, keys: Iterable[bytes]) -> None:
        """See `Medium.abandon`."""

    def take_evicted(self) -> list[bytes]:
        """See `Medium.take_evicted`."""
        return []

    def present(self, key: bytes) -> bool:
        """See `Medium.present`."""
        return False

    def probe(self, keys: Sequence[bytes]) -> int | None:
        """See `Backend.probe`."""
        return self._batches.probe(keys)

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`."""
        return await self._batches.read(keys, views, expired)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`."""
        return await self._batches.write(keys, views, expired)

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`."""
        await self._batches.remove(keys)

    async def forget(self, salt: int) -> int:
        """See `Backend.forget`."""
        return await self._batches.forget(salt)

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`."""
        self.generation = max(self.generation + 1, generation)
        await self._batches.clear()


# -- views of objects


def unfit_views(
    views: Sequence[memoryview], count: int, block_bytes: int, *, writable: bool
) -> frozenset[int]:
    """Positions whose view cannot hold an object: too short, too long, with gaps, or missing.

    A store moves `block_bytes` bytes from the start of a view, so a shorter one would expose the
    memory behind it.

    Args:
        views: of the objects.
        count: objects of the batch.
        block_bytes: bytes of an object.
        writable: whether the views are written.
    """
    unfit = {
        i
        for i, view in enumerate(views)
        if view.nbytes != block_bytes or not view.c_contiguous or (writable and view.readonly)
    }
    return frozenset(unfit.union(range(len(views), count)))


async def move_fitting(
    keys: Sequence[bytes],
    views: Sequence[memoryview],
    block_bytes: int,
    move: Callable[[Sequence[bytes], Sequence[memoryview]], Awaitable[bytearray]],
    *,
    writable: bool,
) -> bytearray:
    """Move the objects whose views can hold them.

    Args:
        keys: of the batch.
        views: of the objects.
        block_bytes: bytes of an object.
        move: one outcome for each key that it is given.
        writable: whether the views are written.

    Returns:
        One outcome a key. REFUSED where the view is unfit.
    """
    unfit = unfit_views(views, len(keys), block_bytes, writable=writable)
    if not unfit:
        return await move(keys, views)
    fit = [i for i in range(len(keys)) if i not in unfit]
    outcomes = bytearray([Outcome.REFUSED]) * len(keys)
    if fit:
        moved = await move([keys[i] for i in fit], [views[i] for i in fit])
        for i, outcome in zip(fit, moved, strict=True):
            outcomes[i] = outcome
    return outcomes
