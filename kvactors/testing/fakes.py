"""Fakes of a simulation: copies, stores and sinks that take virtual time and fail on command.

Real bytes are moved, half of them before the delay and half after it: code that uses a block too
early, or gives it to another request too early, sees wrong bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import anyio
import xxhash

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.data_plane.base import Direction, Progress
from kvactors.data_plane.engine import CopyEngine
from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.flush_notifier.messages import PathPart
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.identity import Lineage
from kvactors.storage.backend import Expired, WriteReport
from kvactors.storage.local_store import LocalStore
from kvactors.storage.messages import Outcome
from kvactors.testing.faults import SLOWER, Fault, FaultySink, Gate, Latency, StoreFaults, instant


class SimExecutor(CopyEngine):
    """latency: seconds of each copy, and `slower` more. gate: copies that come while it is shut
    hang. failing: pairs still to fail, counted off as copies come. Their targets hold half of their
    bytes. moved, failed, delayed: what became of pairs and copies so far."""

    def __init__(self, device: Device, arena: Arena, latency: Latency) -> None:
        super().__init__(device, arena)
        self.latency = latency
        self.gate = Gate()
        self.failing = 0
        self.slower = 0.0
        self.moved = self.failed = self.delayed = 0
        self._scratch: Arena | None = None

    async def run(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        """See `CopyEngine`. Like a thread in the middle of a copy, it goes on to its end when it is
        cancelled."""
        bad = min(self.failing, len(blocks))
        self.failing -= bad
        self.failed += bad
        self.moved += len(blocks) - bad
        good = len(blocks) - bad
        if direction is Direction.TO_DEVICE:
            work = self._to_device(blocks, slots, good, progress)
        elif direction is Direction.TO_HOST:
            work = self._to_host(blocks, slots, good)
        else:
            work = self._within(blocks[:good], slots[:good])
        await wait_uncancelled(asyncio.get_running_loop().create_task(work))
        return tuple(range(good, len(blocks)))

    async def _within(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy, and again at the end: a source or a target that was given to another request too
        early has wrong bytes."""
        self.device.copy_blocks(sources, targets)
        await self._pause()
        self.device.copy_blocks(sources, targets)

    async def _pause(self, share: float = 1.0) -> None:
        self.delayed += self.slower > 0
        await asyncio.sleep(share * (self.latency() + self.slower))
        await self.gate.passed()

    async def _to_device(
        self, blocks: Sequence[int], slots: Sequence[int], good: int, progress: Progress | None
    ) -> None:
        count = self.device.layout.num_layers + self.device.layout.extra_layers
        first = max(1, count // 2)
        groups = (
            [range(first), range(first, count)]
            if progress is None
            else [range(i, i + 1) for i in range(count)]
        )
        for i, layers in enumerate(groups):
            pairs = slice(0, len(blocks) if i < len(groups) - 1 else good)
            if i:
                await self._pause(1 / len(groups))
            if layers:
                self.device.copy_to_device(blocks[pairs], self.arena, slots[pairs], layers)
            if progress is not None and (i < len(groups) - 1 or good == len(blocks)):
                progress(layers.stop)
        await self._pause()
        # a second time: later changes to the slots must not matter, and the blocks still belong to
        # this copy
        self.device.copy_to_device(blocks[:good], self.arena, slots[:good])

    async def _to_host(self, blocks: Sequence[int], slots: Sequence[int], good: int) -> None:
        half = self.arena.block_bytes // 2
        self._part(blocks, slots, slice(0, half))
        await self._pause()
        self._part(blocks[:good], slots[:good], slice(half, None))

    def _part(self, blocks: Sequence[int], slots: Sequence[int], part: slice) -> None:
        """Copy some bytes of each block as the device has them now."""
        if self._scratch is None:
            self._scratch = Arena(self.device.num_blocks, self.arena.block_bytes)
        self.device.copy_to_host(blocks, self._scratch, range(len(blocks)))
        for j, slot in enumerate(slots):
            self.arena.view(slot)[part] = self._scratch.view(j)[part]

    async def inject(self, fault: Fault) -> None:
        if fault.kind == "copy_fail":
            self.failing += fault.amount
        elif fault.kind == "copy_slow":
            self.slower = SLOWER * fault.amount
        else:
            self.gate.close()

    async def recover(self, fault: Fault) -> None:
        if fault.kind in ("copy_slow", "copy_hang"):
            self.slower = 0.0
            self.gate.open()

    def heal(self) -> None:
        self.failing, self.slower = 0, 0.0
        self.gate.open()

    async def close(self) -> None:
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None


# -- stores


class SimBackend(LocalStore, StoreFaults):
    """Objects as bytes, each with the XXH3-64 of the intended bytes, in order of writing. Their
    lineages and the numbers of their salts are kept, also of those removed since. tearing: writes
    still to be cut short, unnoticed."""

    keeps_lineages = True

    def __init__(
        self, digest: bytes, block_bytes: int, capacity: int = 0, latency: Latency = instant
    ) -> None:
        LocalStore.__init__(self, digest, block_bytes, capacity)
        StoreFaults.__init__(self, latency)
        self.objects: dict[bytes, tuple[bytes, int]] = {}
        self.lineages: dict[bytes, Lineage] = {}
        self.salts: dict[bytes, int] = {}
        self.tearing = self.torn = 0
        self._unread: list[bytes] = []  # paths still to be read

    async def open(self) -> None:
        """Find the objects that are there."""
        self.pending.clear()
        self.catalog.clear()
        self.catalog.admit(list(self.objects), self.salts)

    async def close(self) -> None:
        """The objects stay."""

    async def load(self, key: bytes, into: memoryview) -> Outcome:
        """See `LocalStore.load`. Half of the bytes come before the delay."""
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
        """See `LocalStore.save`. Half of the bytes are read after the delay."""
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
        salt = self.catalog.salt(key)
        if salt is not None:
            self.salts[key] = salt
        return Outcome.OK

    async def erase(self, keys: Sequence[bytes]) -> None:
        """See `LocalStore.erase`. Half of them go after the delay."""
        half = len(keys) // 2
        for key in keys[:half]:
            self.objects.pop(key, None)
        if keys:
            await self.delay()
        for key in keys[half:]:
            if key not in self.catalog:
                self.objects.pop(key, None)

    async def each(self, work: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """See `LocalStore.each`. All at once."""

        async def do(item: Callable[[], Awaitable[None]]) -> None:
            await item()

        async with anyio.create_task_group() as tasks:
            for item in work:
                tasks.start_soon(do, item)

    def flip(self, count: int) -> None:
        """Flip a bit in the oldest objects that are whole."""
        for key in list(self.objects)[:count]:
            data, checksum = self.objects[key]
            self.objects[key] = (data[:-1] + bytes([data[-1] ^ 1]), checksum)
            self.flipped += 1

    def lose(self, count: int) -> None:
        for key in list(self.objects)[:count]:
            del self.objects[key]
            self.vanished += 1

    def damage(self, fault: Fault) -> None:
        if fault.kind == "torn_write":
            self.tearing += fault.amount
        elif fault.kind == "bit_flip":
            self.flip(fault.amount)
        elif fault.kind == "object_lost":
            self.lose(fault.amount)
        else:
            super().damage(fault)

    def heal(self) -> None:
        super().heal()
        self.tearing = 0

    async def write(
        self,
        keys: Sequence[bytes],
        views: Sequence[memoryview],
        expired: Expired,
        lineages: Sequence[Lineage | None] = (),
        salts: Sequence[int | None] = (),
    ) -> WriteReport:
        self.lineages |= {
            key: one for key, one in zip(keys, lineages, strict=False) if one is not None
        }
        return await super().write(keys, views, expired, (), salts)

    # -- paths, in the order of writing, so that children come before their parents

    def begin_paths(self) -> None:
        self._unread = list(self.objects)

    async def next_paths(self, most: int) -> list[PathPart] | None:
        await self.delay()
        if self.down or not self._unread:
            return None
        keys, self._unread = self._unread[:most], self._unread[most:]
        return [part_of(key, self.lineages[key]) for key in keys if key in self.lineages]

    def end_paths(self) -> None:
        self._unread.clear()


def part_of(key: bytes, lineage: Lineage) -> PathPart:
    """One block as a part of a path."""
    extra_keys = ((0, lineage.extra_key),) if lineage.extra_key else ()
    return PathPart(lineage.parent, key, lineage.tokens, lineage.scope, extra_keys)


class SimSink(FaultySink):
    """A sink with a latency: seconds each call takes."""

    def __init__(self, inner: Sink, latency: Latency = instant) -> None:
        super().__init__(inner)
        self.latency = latency

    async def _before(self) -> None:
        await asyncio.sleep(self.latency())
        await super()._before()
