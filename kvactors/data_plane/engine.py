"""Copy engines of the host: low-priority threads, or, for loops of virtual time, the loop's
thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.data_plane.base import CLOSE_LIMIT, NO_STREAMS, Direction, Progress
from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.device.events import RecordedEvent
from kvactors.errors import DeviceError
from kvactors.threads import atexit_close, in_thread, lower_priority

PIECE = 2 << 20
"""Bytes a hand-off to a thread should at least be worth: each costs some tens of microseconds."""


class CopyEngine(ABC):
    """Copies between a device and the arena."""

    def __init__(self, device: Device, arena: Arena, threads: int) -> None:
        self.device = device
        self.arena = arena
        self.threads = threads

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
        """Copy every pair. Returns the indices of pairs whose bytes did not arrive. No copy runs
        after it has returned or been cancelled.

        progress: with it, a copy to the device goes layer by layer.
        """

    def check_streams(self) -> None:
        raise DeviceError(NO_STREAMS)

    def make_stream_wait(self, stream: int, blocks: Sequence[int], layer: int) -> bool:
        return False

    def begin_stream_wait(self, stream: int, blocks: Sequence[int]) -> asyncio.Future[None] | None:
        return None

    def record_event(self, stream: int) -> RecordedEvent:
        raise DeviceError(NO_STREAMS)

    async def close(self) -> None:
        """No more copies."""

    def on_status(self, changed: Callable[[bool, bool], None]) -> None:
        """Call `changed` when copies become impossible, with whether they are possible and whether
        memory may have been lost. Calls it immediately if they are impossible already."""

    def acknowledge_loss(self) -> None:
        """See `DataPlane`."""

    def abandon_pending(self) -> None:
        """See `DataPlane`."""

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


class _Piece(NamedTuple):
    direction: Direction
    blocks: Sequence[int]
    slots: Sequence[int]
    layers: range | None
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[bool]


class ThreadedCopies(CopyEngine):
    """Copies in `threads` threads, started at the first copy."""

    def __init__(self, device: Device, arena: Arena, threads: int) -> None:
        super().__init__(device, arena, threads)
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []
        atexit_close(self)

    def end(self, limit: float) -> None:
        """The interpreter exits: copies must end first. See `threads.atexit_close`."""
        until = time.monotonic() + limit
        for _ in self._workers:
            self._pieces.put(None)
        for worker in self._workers:
            worker.join(max(0.0, until - time.monotonic()))

    async def run(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        if not self._workers:
            self._start()
        loop = asyncio.get_running_loop()
        layerwise = progress is not None and direction is Direction.TO_DEVICE
        groups = self.layer_groups(len(blocks)) if layerwise else [None]
        step = self._step(len(blocks), len(groups))
        starts = range(0, len(blocks), step)
        futures: list[list[asyncio.Future[bool]]] = []
        for layers in groups:
            futures.append([loop.create_future() for _ in starts])
            for start, future in zip(starts, futures[-1], strict=True):
                part = slice(start, start + step)
                self._pieces.put(_Piece(direction, blocks[part], slots[part], layers, loop, future))
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
        return max(least, -(-pairs // self.threads), 1)

    def _start(self) -> None:
        for i in range(self.threads):
            worker = threading.Thread(target=self._work, name=f"kvactors-copy-{i}", daemon=True)
            worker.start()
            self._workers.append(worker)

    def _work(self) -> None:
        lower_priority()
        while (piece := self._pieces.get()) is not None:
            try:
                self.copy(piece.direction, piece.blocks, piece.slots, piece.layers)
                good = True
            except (
                BaseException
            ):  # no error may end the thread: the pieces behind it would wait without end
                good = False
            try:
                piece.loop.call_soon_threadsafe(_finish, piece.done, good)
            except RuntimeError:
                return  # the loop is closed: no task waits any more

    async def close(self) -> None:
        """End the threads. A thread stuck in a copy is abandoned after CLOSE_LIMIT seconds (it is a
        daemon)."""
        workers, self._workers = self._workers, []
        for _ in workers:
            self._pieces.put(None)

        def join() -> None:
            for worker in workers:
                worker.join(CLOSE_LIMIT)

        try:
            if workers:
                await in_thread(join, "kvactors-copy-close")
        finally:
            if any(worker.is_alive() for worker in workers):
                self.arena.keep()


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


def _finish(done: asyncio.Future[bool], good: bool) -> None:
    if not done.done():
        done.set_result(good)
