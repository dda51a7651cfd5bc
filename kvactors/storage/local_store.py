"""`LocalStore`, base of the stores that one process owns."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from kvactors.errors import StoreError
from kvactors.identity import Lineage
from kvactors.storage.backend import Backend, Expired, ReadReport, StoreStatistics, WriteReport
from kvactors.storage.catalog import Catalog, StoreShares
from kvactors.storage.messages import Outcome

FORGET_STEP_OBJECTS = 1024
"""Objects of a salt that are deleted before other tasks may run."""

REMOVED_PAGE = 1024
"""Keys that one call of `take_removed` returns at most."""

SLICE_S = 0.0005
"""Seconds of a batch after which other tasks run."""


class LocalStore(Backend):
    """Base of the stores that one process owns. A catalog of the keys, in order of use, evicts
    within the capacity (objects at most, 0 for no limit). A subclass moves one object at a time
    (`load` and `save`) or groups of them (`load_group` and `save_group`), and erases them.

    Keys change hands synchronously: admission and removal take effect before anything else runs on
    the loop."""

    is_complete = True

    def __init__(self, digest: bytes, block_bytes: int, capacity: int = 0) -> None:
        super().__init__(digest, block_bytes)
        self.catalog = Catalog(capacity)  # every key, those of `pending` included
        self.pending: set[bytes] = set()  # keys in the catalog whose objects are being written
        self._unerased: set[bytes] = set()  # of clears that have not completed

    # -- the objects, in memory or in files

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """Read an object into block_bytes of `into`: OK, MISS, CORRUPT or UNAVAILABLE. If not OK,
        the contents of `into` are undefined. When the call has ended, cancelled or not, `into` is
        not written any more."""
        raise NotImplementedError

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """Write an object, whole or not at all: OK, NO_SPACE or UNAVAILABLE. When the call has
        ended, `data` is not read any more."""
        raise NotImplementedError

    async def load_group(
        self, keys: Sequence[bytes], into: Sequence[memoryview], expired: Expired
    ) -> Sequence[Outcome]:
        """`load` of objects. LATE for those that are not begun before the deadline."""
        return await self._each(self.load, keys, into, expired)

    async def save_group(
        self,
        keys: Sequence[bytes],
        data: Sequence[memoryview],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
    ) -> Sequence[Outcome]:
        """`save` of objects. LATE for those that are not begun before the deadline. `lineages` as
        in `Backend.write`."""
        return await self._each(self.save, keys, data, expired)

    @abstractmethod
    async def erase(self, keys: Sequence[bytes]) -> Outcome | None:
        """Delete objects that the catalog does not have any more. UNAVAILABLE or NO_SPACE if a
        later process may find them."""

    def present(self, key: bytes) -> bool:
        """Whether an object can be read now, even if a read did not find it: it may have been
        written since."""
        return False

    # -- batches

    def probe(self, keys: Sequence[bytes]) -> int | None:
        return self.readable_run(keys)

    def readable_run(self, keys: Sequence[bytes]) -> int:
        """Length of the leading run of keys whose objects can be read. They count as used now."""
        ready = next((i for i, key in enumerate(keys) if key in self.pending), len(keys))
        return self.catalog.run(keys[:ready])

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        outcomes = await self.load_group(keys, views, expired)
        results = list(zip(keys, outcomes, strict=True))
        corrupt = [key for key, outcome in results if outcome == Outcome.CORRUPT]
        missing = [
            key for key, outcome in results if outcome == Outcome.MISS and not self.present(key)
        ]
        gone = self.catalog.remove(key for key in (*corrupt, *missing) if key not in self.pending)
        await self.erase([key for key in gone if key not in self.catalog])
        return ReadReport(bytes(outcomes), gone)

    async def write(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        offered = [key for key in keys if key not in self.pending]
        by_key = dict(zip(keys, salts, strict=True)) if salts else {}
        admission = self.catalog.admit(offered, by_key)
        self.counters.evicted += len(admission.evicted)
        fresh = set(admission.fresh)
        known = dict.fromkeys(admission.existing, Outcome.EXISTS)
        known.update(dict.fromkeys(admission.refused, Outcome.REFUSED))
        outcomes = bytearray(known.get(key, Outcome.LATE) for key in keys)
        taken = fresh.difference(admission.refused)
        chosen = [i for i, key in enumerate(keys) if key in taken]
        self.pending |= fresh
        try:
            await self.erase(admission.evicted)
            found = await self.save_group(
                [keys[i] for i in chosen],
                [views[i] for i in chosen],
                expired,
                [lineages[i] for i in chosen] if lineages else (),
            )
            # The others were evicted by another batch since, or cleared.
            kept = [keys[i] in self.catalog for i in chosen]
            for i, outcome, stays in zip(chosen, found, kept, strict=True):
                outcomes[i] = outcome if stays or outcome != Outcome.OK else Outcome.REFUSED
            await self.erase([keys[i] for i, stays in zip(chosen, kept, strict=True) if not stays])
        except BaseException:
            # Saved or not, no object is certain to be readable.
            outcomes[:] = bytes([Outcome.UNAVAILABLE]) * len(keys)
            raise
        finally:
            self.pending -= fresh
            results = zip(keys, outcomes, strict=True)
            self.catalog.remove({key for key, outcome in results if outcome != Outcome.OK} & fresh)
        return WriteReport(bytes(outcomes), admission.evicted)

    async def remove(self, keys: Sequence[bytes]) -> None:
        self.catalog.remove(key for key in keys if key not in self.pending)
        await self.erase([key for key in keys if key not in self.catalog])

    async def forget(self, salt: int) -> int:
        catalog = self.catalog
        while keys := catalog.remove(catalog.shares.first(salt, FORGET_STEP_OBJECTS)):
            if await self.erase(keys) in (Outcome.NO_SPACE, Outcome.UNAVAILABLE):
                raise StoreError("the objects of a salt could not be deleted")
            await asyncio.sleep(0)
        return len(catalog) - catalog.shares.counted

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`. For stores that do not outlive the process, where erasing cannot
        fail."""
        self.generation = max(self.generation + 1, generation)
        self._unerased.update(self.catalog)
        self.catalog.clear()
        await self.erase([key for key in self._unerased if key not in self.catalog])
        self._unerased.clear()

    # -- keys, without those whose objects are still being written

    @property
    def shares(self) -> StoreShares | None:  # type: ignore[override]
        return self.catalog.shares

    def keys(self) -> list[bytes]:
        return [key for key in self.catalog if key not in self.pending]

    def key_slices(self) -> Iterator[list[bytes]]:
        pending = self.pending
        return ([key for key in part if key not in pending] for part in self.catalog.slices())

    def count(self) -> int:
        return len(self.catalog) - sum(key in self.catalog for key in self.pending)

    def holds(self, key: bytes) -> bool:
        return key in self.catalog and key not in self.pending

    def take_removed(self) -> list[bytes]:
        departed, removed = self.catalog.departed, list[bytes]()
        while departed and not removed:
            page = list(islice(departed, REMOVED_PAGE))
            departed.difference_update(page)
            removed = [key for key in page if not self.holds(key)]
        return removed

    def acknowledge_removed(self, keys: Iterable[bytes]) -> None:
        self.catalog.departed.difference_update(keys)

    def statistics(self) -> StoreStatistics:
        catalog = self.catalog
        return self.counters.statistics(
            self.count(), self.block_bytes, catalog.capacity, catalog.shares.quota_evictions
        )

    # -- one object at a time

    async def _each(
        self,
        move: Callable[[bytes, memoryview], Awaitable[Outcome]],
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        expired: Expired,
    ) -> list[Outcome]:
        outcomes = [Outcome.LATE] * len(keys)

        async def one(i: int) -> None:
            if not expired():
                outcomes[i] = await move(keys[i], views[i])

        await self.each([partial(one, i) for i in range(len(keys))])
        return outcomes

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Await the coroutines that `work` makes: one after another, at most SLICE_S seconds at a
        time."""
        time = asyncio.get_running_loop().time
        until = time() + SLICE_S
        for item in work:
            await item()
            if time() > until:
                await asyncio.sleep(0)
                until = time() + SLICE_S
