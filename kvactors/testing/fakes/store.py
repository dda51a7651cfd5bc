"""A store in memory that behaves as disks do: slow, full, gone for a while, and with objects that
rot. It outlives its process: `close` leaves the objects, and the next `open` finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

import anyio
import xxhash

from kvactors.device.arena import Arena
from kvactors.flush_notifier.messages import PathPart
from kvactors.lineage import Lineage
from kvactors.storage.backends.base import Expired, WriteReport
from kvactors.storage.backends.owned import OwnedBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.fakes.gate import SLOWER, Gate, Latency, instant
from kvactors.testing.plan import Fault


class SimBackend(OwnedBackend):
    """Objects as bytes, each with the XXH3-64 of what was meant to be written. latency: seconds of
    each read and write.

    gate: reads and writes that come to it while it is shut hang until it opens. down: nothing can
    be had. full: nothing can be written. lineages are kept. slower: seconds more each call takes.
    tearing: writes still to be cut short, unnoticed. troubled: calls that met any of these faults.
    """

    keeps_lineages = True

    def __init__(
        self, fingerprint: bytes, block_bytes: int, capacity: int = 0, latency: Latency = instant
    ) -> None:
        super().__init__(fingerprint, block_bytes, capacity)
        self.objects: dict[bytes, tuple[bytes, int]] = {}
        self.lineages: dict[bytes, Lineage] = {}  # of objects that are there or were
        self._unread: list[bytes] = []
        self.latency = latency
        self.gate = Gate()
        self.down = self.full = False
        self.slower = 0.0
        self.tearing = 0
        self.troubled = self.torn = self.flipped = self.vanished = 0

    async def open(self) -> None:
        """Find what is there."""
        self.pending.clear()
        self.catalog.clear()
        self.catalog.admit(list(self.objects))

    async def _delay(self) -> None:
        self.troubled += self.slower > 0 or self.gate.shut or self.down
        await asyncio.sleep(self.latency() + self.slower)
        await self.gate.passed()

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """See `Backend.load`. Half of the bytes come before the delay."""
        found, half = self.objects.get(key), len(into) // 2
        if found is not None:
            into[:half] = found[0][:half]
        await self._delay()
        if self.down:
            return Outcome.UNAVAILABLE
        found = self.objects.get(key)
        if found is None:
            return Outcome.MISS
        data, checksum = found
        into[:] = data
        return Outcome.OK if xxhash.xxh3_64_intdigest(data) == checksum else Outcome.CORRUPT

    async def save(self, key: bytes, data: memoryview) -> Outcome:
        """See `Backend.save`. Half of the bytes are read after the delay."""
        half = len(data) // 2
        first = bytes(data[:half])
        await self._delay()
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
        return Outcome.OK

    async def write_slots(
        self,
        keys: Sequence[bytes],
        arena: Arena,
        slots: Sequence[int],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
    ) -> WriteReport:
        """See `Backend.write_slots`."""
        self.lineages |= {
            key: one for key, one in zip(keys, lineages, strict=False) if one is not None
        }
        return await super().write_slots(keys, arena, slots, expired)

    def begin_paths(self) -> None:
        """See `Backend.begin_paths`."""
        self._unread = list(self.objects)

    async def next_paths(self, most: int) -> list[PathPart] | None:
        """See `Backend.next_paths`. In the order of writing, so that children come before their
        parents."""
        await self._delay()
        if self.down or not self._unread:
            return None
        keys, self._unread = self._unread[:most], self._unread[most:]
        return [part_of(key, self.lineages[key]) for key in keys if key in self.lineages]

    def end_paths(self) -> None:
        """See `Backend.end_paths`."""
        self._unread.clear()

    async def erase(self, keys: Sequence[bytes]) -> None:
        """See `Backend.erase`. Half of them go after the delay."""
        half = len(keys) // 2
        for key in keys[:half]:
            self.objects.pop(key, None)
        if keys:
            await self._delay()
        for key in keys[half:]:
            if key not in self.catalog:
                self.objects.pop(key, None)

    def abandon(self, keys: Iterable[bytes]) -> None:
        """See `OwnedBackend.abandon`. Saved blocks stay until they are written again."""

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """All at once."""

        async def do(item: Callable[[], Awaitable[None]]) -> None:
            await item()

        async with anyio.create_task_group() as tasks:
            for item in work:
                tasks.start_soon(do, item)

    async def close(self) -> None:
        """The objects stay."""

    # -- what time does to objects

    def flip(self, count: int) -> int:
        """Flip a bit in the oldest objects that are whole. Returns their number."""
        chosen = list(self.objects)[:count]
        for key in chosen:
            data, checksum = self.objects[key]
            self.objects[key] = (data[:-1] + bytes([data[-1] ^ 1]), checksum)
        self.flipped += len(chosen)
        return len(chosen)

    def lose(self, count: int) -> int:
        """Take the oldest objects away behind the store's back. Returns their number."""
        chosen = list(self.objects)[:count]
        for key in chosen:
            del self.objects[key]
        self.vanished += len(chosen)
        return len(chosen)

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: store_down, store_slow, store_hang, disk_full, torn_write, bit_flip,
        object_lost."""
        if fault.kind == "store_slow":
            self.slower = SLOWER * fault.amount
        elif fault.kind == "store_hang":
            self.gate.close()
        elif fault.kind == "store_down":
            self.down = True
        elif fault.kind == "disk_full":
            self.full = True
        elif fault.kind == "torn_write":
            self.tearing += fault.amount
        elif fault.kind == "bit_flip":
            self.flip(fault.amount)
        else:
            self.lose(fault.amount)

    async def recover(self, fault: Fault) -> None:
        """See `Injectable`."""
        if fault.kind in ("store_down", "store_slow", "store_hang", "disk_full"):
            self.heal()

    def heal(self) -> None:
        """End every fault. Damaged objects stay damaged."""
        self.down = self.full = False
        self.slower, self.tearing = 0.0, 0
        self.gate.open()


def part_of(key: bytes, lineage: Lineage) -> PathPart:
    """One block as a part of a path."""
    extra_keys = ((0, lineage.extra_key),) if lineage.extra_key else ()
    return PathPart(lineage.parent, key, lineage.tokens, lineage.scope, extra_keys)


class SimPool(SimBackend):
    """The same as a pool that others use as well: only asking tells what is there, which takes its
    time, and nothing of it is this process's."""

    exclusive = False
    answerable = False
    keeps_lineages = False

    def probe(self, keys: Sequence[bytes]) -> None:
        """See `Backend.probe`."""

    async def ask(self, keys: Sequence[bytes], expired: Expired) -> int:
        """See `Backend.ask`."""
        await self._delay()
        return 0 if self.down or expired() else super().probe(keys) or 0
