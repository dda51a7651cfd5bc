"""A store in memory that behaves as disks do: slow, full, unreachable for a while, and with objects
that rot. It outlives its process: `close` leaves the objects, and the next `open` finds them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

import anyio
import xxhash

from kvactors.device.arena import Arena
from kvactors.errors import StoreUnavailable
from kvactors.flush_notifier.messages import PathPart
from kvactors.lineage import Lineage
from kvactors.storage.backends.base import Backend, Expired, ReadReport, WriteReport
from kvactors.storage.backends.owned_batches import OwnedBatches
from kvactors.storage.backends.path_source import PathSource
from kvactors.storage.catalog import Catalog
from kvactors.storage.inventory import OwnedInventory
from kvactors.storage.messages import Outcome
from kvactors.testing.fault import Fault
from kvactors.testing.faults import StoreFaults
from kvactors.testing.gate import Latency, instant


class SimDisk(StoreFaults):
    """Medium of `SimBackend`: objects as bytes, each with the XXH3-64 of the intended bytes.

    Attributes:
        objects: bytes and checksum by key, in order of writing.
        lineages: of the objects, also of those removed since.
        salts: numbers of the objects' salts, also of those removed since.
        tearing: writes still to be cut short, unnoticed.
        torn: writes cut short so far.
    """

    def __init__(self, catalog: Catalog, latency: Latency = instant) -> None:
        super().__init__(latency)
        self.objects: dict[bytes, tuple[bytes, int]] = {}
        self.lineages: dict[bytes, Lineage] = {}
        self.salts: dict[bytes, int] = {}
        self.tearing = self.torn = 0
        self._catalog = catalog

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """See `Medium.load`. Half of the bytes come before the delay."""
        found, half = self.objects.get(key), len(into) // 2
        if found is not None:
            into[:half] = found[0][:half]
        await self.delay()
        if self.down:
            return Outcome.UNAVAILABLE
        found = self.objects.get(key)
        if found is None:
            return Outcome.MISS
        data, checksum = found
        into[:] = data
        return Outcome.OK if xxhash.xxh3_64_intdigest(data) == checksum else Outcome.CORRUPT

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """See `Medium.save`. Half of the bytes are read after the delay."""
        half = len(data) // 2
        first = bytes(data[:half])
        await self.delay()
        if self.down:
            return Outcome.UNAVAILABLE
        if self.full:
            self.troubled += 1
            return Outcome.NO_SPACE
        whole = first + bytes(data[half:])
        checksum = xxhash.xxh3_64_intdigest(whole)
        if self.tearing:
            self.tearing -= 1
            self.torn += 1
            whole = first + bytes(byte ^ 0x5A for byte in whole[half:])
        self.objects[key] = (whole, checksum)
        salt = self._catalog.salt(key)
        if salt is not None:
            self.salts[key] = salt
        return Outcome.OK

    async def erase(self, keys: Sequence[bytes]) -> None:
        """See `Medium.erase`. Half of them go after the delay."""
        half = len(keys) // 2
        for key in keys[:half]:
            self.objects.pop(key, None)
        if keys:
            await self.delay()
        for key in keys[half:]:
            if key not in self._catalog:
                self.objects.pop(key, None)

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """See `Medium.each`. All at once."""

        async def do(item: Callable[[], Awaitable[None]]) -> None:
            await item()

        async with anyio.create_task_group() as tasks:
            for item in work:
                tasks.start_soon(do, item)

    async def seal(self, keys: Sequence[bytes]) -> Outcome:
        """See `Medium.seal`."""
        return Outcome.OK

    def abandon(self, keys: Iterable[bytes]) -> None:
        """See `Medium.abandon`. Saved blocks stay until they are written again."""

    def take_evicted(self) -> list[bytes]:
        """See `Medium.take_evicted`."""
        return []

    def present(self, key: bytes) -> bool:
        """See `Medium.present`."""
        return False

    def flip(self, count: int) -> int:
        """Flip a bit in the oldest objects that are whole. Returns their number."""
        chosen = list(self.objects)[:count]
        for key in chosen:
            data, checksum = self.objects[key]
            self.objects[key] = (data[:-1] + bytes([data[-1] ^ 1]), checksum)
        self.flipped += len(chosen)
        return len(chosen)

    def lose(self, count: int) -> int:
        """See `StoreFaults.lose`."""
        chosen = list(self.objects)[:count]
        for key in chosen:
            del self.objects[key]
        self.vanished += len(chosen)
        return len(chosen)

    def damage(self, fault: Fault) -> None:
        """See `StoreFaults.damage`: torn_write, bit_flip, object_lost."""
        if fault.kind == "torn_write":
            self.tearing += fault.amount
        elif fault.kind == "bit_flip":
            self.flip(fault.amount)
        elif fault.kind == "object_lost":
            self.lose(fault.amount)
        else:
            super().damage(fault)

    def heal(self) -> None:
        """See `StoreFaults.heal`."""
        super().heal()
        self.tearing = 0


class SimPaths(PathSource):
    """Paths of the objects of a `SimDisk`, in the order of writing, so that children come before
    their parents."""

    def __init__(self, disk: SimDisk) -> None:
        self._disk = disk
        self._unread: list[bytes] = []

    def begin(self) -> None:
        """See `Backend.begin_paths`."""
        self._unread = list(self._disk.objects)

    async def next(self, most: int) -> list[PathPart] | None:
        """See `Backend.next_paths`."""
        await self._disk.delay()
        if self._disk.down or not self._unread:
            return None
        keys, self._unread = self._unread[:most], self._unread[most:]
        lineages = self._disk.lineages
        return [part_of(key, lineages[key]) for key in keys if key in lineages]

    def end(self) -> None:
        """See `Backend.end_paths`."""
        self._unread.clear()


def part_of(key: bytes, lineage: Lineage) -> PathPart:
    """One block as a part of a path."""
    extra_keys = ((0, lineage.extra_key),) if lineage.extra_key else ()
    return PathPart(lineage.parent, key, lineage.tokens, lineage.scope, extra_keys)


class DiskAttribute:
    """An attribute of a store's disk, under the same name."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, store: SimBackend, owner: type) -> Any:
        return getattr(store.disk, self._name)

    def __set__(self, store: SimBackend, value: Any) -> None:
        setattr(store.disk, self._name, value)


class SimBackend(Backend):
    """A store of one process over a `SimDisk`. Lineages are kept.

    Attributes:
        answerable: see `OwnedInventory`.
        disk: the objects, and the faults.
    """

    exclusive = True
    answerable = True
    keeps_lineages = True

    def __init__(
        self, digest: bytes, block_bytes: int, capacity: int = 0, latency: Latency = instant
    ) -> None:
        inventory = OwnedInventory(capacity, answerable=self.answerable)
        super().__init__(digest, block_bytes, inventory)
        self.catalog, self.pending = inventory.catalog, inventory.pending
        self.disk = SimDisk(inventory.catalog, latency)
        self.paths = SimPaths(self.disk)
        self._batches = OwnedBatches(self.disk, inventory, self.counters, block_bytes)

    async def open(self) -> None:
        """Find the objects that are there."""
        self.pending.clear()
        self.catalog.clear()
        self.catalog.admit(list(self.disk.objects), self.disk.salts)

    async def close(self) -> None:
        """The objects stay."""

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

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Arena,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        """See `Backend.write_slots`."""
        self.disk.lineages |= {
            key: one for key, one in zip(keys, lineages, strict=False) if one is not None
        }
        return await super().write_slots(keys, arena, slots, expired, (), salts)

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

    # Attributes of the disk, for short.
    objects, latency, gate = DiskAttribute(), DiskAttribute(), DiskAttribute()
    down, full, slower = DiskAttribute(), DiskAttribute(), DiskAttribute()
    tearing, troubled = DiskAttribute(), DiskAttribute()
    torn, flipped, vanished = DiskAttribute(), DiskAttribute(), DiskAttribute()
    flip, lose = DiskAttribute(), DiskAttribute()
    inject, recover, heal = DiskAttribute(), DiskAttribute(), DiskAttribute()


class SimPool(SimBackend):
    """A pool that other processes use as well: only `ask` finds out which objects it has, which
    takes time, and no object belongs to this process."""

    exclusive = False
    answerable = False
    keeps_lineages = False

    def probe(self, keys: Sequence[bytes]) -> None:
        """See `Backend.probe`."""

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`."""
        await self.disk.delay()
        if self.disk.down:
            raise StoreUnavailable("the pool is down")
        return 0 if expired() else super().probe(keys) or 0
