"""Copies that take virtual time. Real bytes are moved, half of them before the delay and half after
it: code that uses a block too early, or gives it to another request too early, sees wrong bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.data_plane.base import Progress
from kvactors.data_plane.engine import CopyEngine
from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.device.host import HostDevice
from kvactors.gpu_swapper.messages import Direction
from kvactors.layout.base import Layout
from kvactors.testing.fault import Fault
from kvactors.testing.gate import SLOWER, Gate, Latency


class SimDevice(HostDevice):
    """A device whose copies can be refused. failing: how many calls still will be. failed: how many
    were."""

    def __init__(self, layout: Layout, num_blocks: int) -> None:
        super().__init__(layout, num_blocks)
        self.failing = self.failed = 0

    def _refuse(self) -> None:
        if self.failing:
            self.failing -= 1
            self.failed += 1
            raise OSError("the copy was set to fail")

    def copy_to_host(self, blocks: Sequence[int], arena: Arena, slots: Sequence[int]) -> None:
        """See `Device`."""
        self._refuse()
        super().copy_to_host(blocks, arena, slots)

    def copy_to_device(
        self, blocks: Sequence[int], arena: Arena, slots: Sequence[int], layers: range | None = None
    ) -> None:
        """See `Device`."""
        self._refuse()
        super().copy_to_device(blocks, arena, slots, layers)


class SimExecutor(CopyEngine):
    """latency: seconds of each copy. gate: copies that come to it while it is shut hang until it
    opens.

    failing: pairs still to fail, counted off as copies come. Their targets hold half of their
    bytes. slower: seconds more each copy takes. moved, failed, delayed: what became of pairs and
    copies so far.
    """

    def __init__(self, device: Device, arena: Arena, latency: Latency) -> None:
        super().__init__(device, arena, threads=0)
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
        """See `Injectable`: copy_fail, copy_slow, copy_hang."""
        if fault.kind == "copy_fail":
            self.failing += fault.amount
        elif fault.kind == "copy_slow":
            self.slower = SLOWER * fault.amount
        else:
            self.gate.close()

    async def recover(self, fault: Fault) -> None:
        """See `Injectable`."""
        if fault.kind in ("copy_slow", "copy_hang"):
            self.slower = 0.0
            self.gate.open()

    def heal(self) -> None:
        """End every fault."""
        self.failing, self.slower = 0, 0.0
        self.gate.open()

    async def close(self) -> None:
        """See `CopyEngine`."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
