"""Stores that one process owns alone: a catalog knows what they hold, within a capacity, in order
of use."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice

from kvactors.storage.backends.base import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.catalog import Catalog
from kvactors.storage.messages import Outcome

LOST_PAGE = 1024
"""Keys that one call of `lost` returns at most."""


class OwnedBackend(Backend):
    """capacity: objects at most, 0 for no limit. Names change hands synchronously: `probe`, `take`,
    and the admission of a write have their effect before anything else runs on the loop."""

    exclusive = True
    # whether this process alone decides what is there: otherwise `keys`, `names` and `holds` say
    # nothing
    answerable = True

    def __init__(self, fingerprint: bytes, block_bytes: int, capacity: int = 0) -> None:
        super().__init__(fingerprint, block_bytes)
        self.catalog = Catalog(capacity)
        self.pending: set[bytes] = set()  # names in the catalog whose objects are being written
        self._unerased: set[bytes] = set()  # of clears that have not completed
        self.squeezed: list[
            bytes
        ] = []  # evicted because the space ran out, until a batch reports them

    @abstractmethod
    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """Read one object into `into` (block_bytes long): OK, MISS, CORRUPT or UNAVAILABLE (then
        what is in `into` means nothing). Nothing is written there after the call has ended,
        cancelled or not."""

    @abstractmethod
    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """Write one object, whole or not at all: OK, NO_SPACE or UNAVAILABLE. `data` is not read
        after the call has ended."""

    async def seal(self, keys: Sequence[bytes]) -> Outcome:
        """Make saved payloads objects that can be read, all or none: OK, NO_SPACE or
        UNAVAILABLE."""
        return Outcome.OK

    def abandon(self, keys: Iterable[bytes]) -> None:
        """What was saved of these and never sealed will not be (a batch was cancelled)."""

    @abstractmethod
    async def erase(self, keys: Sequence[bytes]) -> None:
        """Delete objects that the catalog has forgotten already."""

    def present(self, key: bytes) -> bool:
        """Whether an object of this name can be read now; asked about names that a read did not
        find and that may have been written since."""
        return False

    @abstractmethod
    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Await the coroutines that `work` makes, as many at once as suits the store."""

    def keys(self) -> list[bytes]:
        """See `Backend.keys`; not what is only being written."""
        names = self.catalog.keys() if self.answerable else []
        return [key for key in names if key not in self.pending] if self.pending else names

    def names(self) -> Iterator[bytes]:
        """See `Backend.names`."""
        pending = self.pending
        return (key for key in self.catalog if key not in pending) if self.answerable else iter(())

    def count(self) -> int:
        """See `Backend.count`."""
        return len(self.catalog) - sum(key in self.catalog for key in self.pending)

    def holds(self, key: bytes) -> bool:
        """See `Backend.holds`."""
        return self.answerable and key in self.catalog and key not in self.pending

    def lost(self) -> list[bytes]:
        """See `Backend.lost`; a page of them."""
        departed, lost = self.catalog.departed, list[bytes]()
        while departed and not lost:
            page = list(islice(departed, LOST_PAGE))
            departed.difference_update(page)
            lost = [key for key in page if not self.holds(key)]
        return lost

    def told(self, keys: Iterable[bytes]) -> None:
        """See `Backend.told`."""
        self.catalog.departed.difference_update(keys)

    def probe(self, keys: Sequence[bytes]) -> int:
        """See `Backend.probe`."""
        if self.breaker.state() == "open":
            return 0
        ready = next((i for i, key in enumerate(keys) if key in self.pending), len(keys))
        return self.catalog.run(keys[:ready])

    def take(self, keys: Sequence[bytes]) -> None:
        """Forget names that are about to be read for the last time (an exclusive store): they stop
        counting at once."""
        self.catalog.remove(keys)

    async def read(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> ReadReport:
        """See `Backend.read`."""
        outcomes = bytearray([Outcome.LATE]) * len(keys)

        async def one(i: int) -> None:
            if not expired():
                outcomes[i] = await self.load(keys[i], views[i])

        await self._batch(len(keys), one, outcomes)
        self.saw(bytes(outcomes))
        corrupt = [
            key for key, outcome in zip(keys, outcomes, strict=True) if outcome == Outcome.CORRUPT
        ]
        missing = [
            key
            for key, o in zip(keys, outcomes, strict=True)
            if o == Outcome.MISS and not self.present(key)
        ]
        self.reads += outcomes.count(Outcome.OK)
        gone = self.catalog.remove(key for key in (*corrupt, *missing) if key not in self.pending)
        await self.erase([key for key in gone if key not in self.catalog])
        return ReadReport(bytes(outcomes), gone)

    async def write(
        self, keys: Sequence[bytes], views: Sequence[memoryview], expired: Expired
    ) -> WriteReport:
        """See `Backend.write`."""
        busy = set(self.pending)
        admission = self.catalog.admit([key for key in keys if key not in busy])
        self.evicted += len(admission.evicted)
        outcomes = bytearray([Outcome.LATE]) * len(keys)
        fresh, existing, refused = (
            set(admission.fresh),
            set(admission.existing),
            set(admission.refused),
        )
        self.pending |= fresh

        async def one(i: int) -> None:
            key = keys[i]
            if key in refused:
                outcomes[i] = Outcome.NO_SPACE
            elif key in existing:
                outcomes[i] = Outcome.EXISTS
            elif key in fresh and not expired():
                outcomes[i] = await self.save(key, views[i])

        try:
            await self.erase(admission.evicted)
            await self._batch(len(keys), one, outcomes)
            await self._seal(keys, fresh, outcomes)
            self.saw(bytes(outcomes))
        except BaseException:
            outcomes[:] = bytes([Outcome.UNAVAILABLE]) * len(
                keys
            )  # saved or not, nothing of it was sealed for sure
            raise
        finally:
            self.abandon(fresh)
            self.pending -= fresh
            failed = {
                key for key, outcome in zip(keys, outcomes, strict=True) if outcome != Outcome.OK
            }
            self.catalog.remove(fresh & failed)
        self.writes += outcomes.count(Outcome.OK)
        squeezed, self.squeezed = self.squeezed, []
        return WriteReport(bytes(outcomes), admission.evicted + squeezed)

    async def _seal(self, keys: Sequence[bytes], fresh: set[bytes], outcomes: bytearray) -> None:
        saved = [i for i, key in enumerate(keys) if key in fresh and outcomes[i] == Outcome.OK]
        wanted = [
            i for i in saved if keys[i] in self.catalog
        ]  # the others were evicted by another batch since, or cleared
        for i in saved:
            outcomes[i] = Outcome.NO_SPACE
        outcome = await self.seal([keys[i] for i in wanted]) if wanted else Outcome.NO_SPACE
        for i in wanted:
            outcomes[i] = outcome if keys[i] in self.catalog else Outcome.NO_SPACE
        await self.erase([keys[i] for i in saved if keys[i] not in self.catalog])

    async def _batch(
        self, count: int, one: Callable[[int], Awaitable[None]], outcomes: bytearray
    ) -> None:
        if self.breaker.closed():
            await self.each([partial(one, i) for i in range(count)])
        else:
            outcomes[:] = bytes([Outcome.UNAVAILABLE]) * count

    async def remove(self, keys: Sequence[bytes]) -> None:
        """See `Backend.remove`; an object that is being written stays. Names that were taken before
        are no more in the catalog: their objects go all the same."""
        self.catalog.remove(key for key in keys if key not in self.pending)
        await self.erase([key for key in keys if key not in self.catalog])

    async def clear(self, generation: int = 0) -> None:
        """See `Backend.clear`; for stores that do not survive their process, where erasing cannot
        fail."""
        self._unerased.update(self.catalog.keys())
        self.catalog.clear()
        self.generation = max(self.generation + 1, generation)
        keys = [key for key in self._unerased if key not in self.catalog]
        await self.erase(keys)
        self._unerased.clear()
