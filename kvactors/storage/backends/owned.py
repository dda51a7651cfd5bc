"""Base of stores that one process owns and that keep one object at a time."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence

from kvactors.storage.backends.base import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.backends.owned_batches import OwnedBatches
from kvactors.storage.inventory import OwnedInventory
from kvactors.storage.messages import Outcome

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
