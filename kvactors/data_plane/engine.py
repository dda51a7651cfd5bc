"""Copy engines of the host: low-priority threads, or, for loops of virtual time, the loop's
thread."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.data_plane.base import CLOSE_LIMIT, Direction, EngineStreams, Progress
from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.threads import Workers

PIECE = 2 << 20
"""Bytes a hand-off to a thread should at least be worth: each costs some tens of microseconds."""


def on_loop(call: Future[Any], then: Callable[[BaseException | None], None]) -> None:
    """Call `then` on the running loop with the error of a thread's call, None without one."""
    loop = asyncio.get_running_loop()

    def done(ended: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop is closed: no task waits any more
            loop.call_soon_threadsafe(then, ended.exception())

    call.add_done_callback(done)


class CopyEngine(EngineStreams, ABC):
    """Copies between a device and the arena. broke: called on the loop when copies become
    impossible, with whether memory may have been lost."""

    broke: Callable[[bool], None] | None = None

    def __init__(self, device: Device, arena: Arena) -> None:
        self.device = device
        self.arena = arena

    @property
    def trouble(self) -> str:
        """Why copies are impossible. Empty while they are possible."""
        return ""

    async def open(self) -> None:
        """Get ready, once the arena's memory is there. Raises DeviceError."""

    @abstractmethod
    async def run(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        """Copy every pair, with `progress` to the device layer by layer. Returns the indices of
        pairs whose bytes did not arrive. No copy runs after it has returned or been cancelled."""

    async def close(self) -> None:
        """No more copies."""

    def abandon_pending(self) -> None: ...

    def copy(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        layers: range | None = None,
    ) -> None:
        """The blocking copy itself."""
        if direction is Direction.TO_HOST:
            self.device.copy_to_host(blocks, self.arena, slots)
        elif direction is Direction.WITHIN:
            self.device.copy_blocks(blocks, slots)
        else:
            self.device.copy_to_device(blocks, self.arena, slots, layers)

    def statistics(self) -> Any:
        """The engine's record, or None."""

    def layer_groups(self, pairs: int, least: int = PIECE) -> list[range]:
        """All layers in runs worth at least `least` bytes for so many pairs."""
        count = self.device.layout.num_layers + self.device.layout.extra_layers
        step = max(1, -(-least * count // max(1, pairs * self.device.layout.block_bytes)))
        return [range(first, min(count, first + step)) for first in range(0, count, step)]


class NoCopies(CopyEngine):
    """The engine of a plane whose device blocks are not set yet."""

    def __init__(self) -> None:
        """There is no device and no arena to copy between."""

    async def run(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        """See `CopyEngine`: no pair arrives."""
        return tuple(range(len(blocks)))


class InlineCopies(CopyEngine):
    """Copies in the calling thread."""

    async def run(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        layerwise = progress is not None and direction is Direction.TO_DEVICE
        try:
            for layers in self.layer_groups(len(blocks), 1) if layerwise else [None]:
                await asyncio.sleep(0)
                self.copy(direction, blocks, slots, layers)
                if progress is not None and layers is not None:
                    progress(layers.stop)
        except Exception:
            return tuple(range(len(blocks)))
        return ()


class ThreadedCopies(CopyEngine):
    """Copies in `threads` threads, started at the first copy."""

    def __init__(self, device: Device, arena: Arena, threads: int) -> None:
        super().__init__(device, arena)
        self._workers = Workers(threads, "kvactors-copy")

    async def run(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        layerwise = progress is not None and direction is Direction.TO_DEVICE
        groups = self.layer_groups(len(blocks)) if layerwise else [None]
        step = self._step(len(blocks), len(groups))
        starts = range(0, len(blocks), step)
        parts = [slice(start, start + step) for start in starts]
        futures = [
            [self._begin(direction, blocks[part], slots[part], layers) for part in parts]
            for layers in groups
        ]
        if progress is not None and layerwise:
            _report(progress, [group for group in groups if group is not None], futures)
        await wait_uncancelled(asyncio.gather(*(future for group in futures for future in group)))
        bad = [
            start
            for i, start in enumerate(starts)
            if not all(group[i].result() for group in futures)
        ]
        return tuple(j for start in bad for j in range(start, min(start + step, len(blocks))))

    def _step(self, pairs: int, groups: int) -> int:
        """Pairs a piece: shared among the threads, but none below PIECE bytes."""
        least = max(1, PIECE * groups // max(1, self.device.layout.block_bytes))
        return max(least, -(-pairs // self._workers.threads), 1)

    def _begin(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        layers: range | None,
    ) -> asyncio.Future[bool]:
        """Copy in a thread. The result is whether it succeeded."""
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def ended(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(error is None)

        on_loop(self._workers.submit(partial(self.copy, direction, blocks, slots, layers)), ended)
        return done

    async def close(self) -> None:
        """End the threads. A thread stuck in a copy is abandoned after CLOSE_LIMIT seconds (it is a
        daemon)."""
        try:
            await self._workers.drained(CLOSE_LIMIT)
        finally:
            if self._workers.busy:
                self.arena.keep()
            self._workers.close()


def _report(
    progress: Progress, groups: Sequence[range], futures: Sequence[Sequence[asyncio.Future[bool]]]
) -> None:
    """Call `progress` as the groups' futures come true, in the groups' order."""
    reached = 0

    def look(_done: asyncio.Future[bool]) -> None:
        nonlocal reached
        before = reached
        while reached < len(groups) and all(
            one.done() and not one.cancelled() and one.result() for one in futures[reached]
        ):
            reached += 1
        if reached > before:
            progress(groups[reached - 1].stop)

    for group in futures:
        for future in group:
            future.add_done_callback(look)
