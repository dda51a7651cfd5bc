"""Who carries the copies out: threads of our own at low priority, or, for loops of virtual time, the loop's own thread."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import anyio.to_thread

from kvactors.actor.uncancelled import to_the_end
from kvactors.device.arena import Arena
from kvactors.device.base import Device
from kvactors.gpu_swapper.messages import Direction
from kvactors.threads import lower_priority

PIECE = 2 << 20
"""Bytes a hand-off to a thread should at least be worth: each costs some tens of microseconds."""

CLOSE_LIMIT = 10.0
"""Seconds `close` waits for a thread in the middle of a copy."""


class Executor(ABC):
    """Copies between a device and the arena."""

    def __init__(self, device: Device, arena: Arena, threads: int) -> None:
        self.device = device
        self.arena = arena
        self.threads = threads

    @abstractmethod
    async def run(self, direction: Direction, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        """Copy every pair; returns the indices of pairs whose bytes did not arrive. When it has returned or been cancelled, no copy runs."""

    async def close(self) -> None:
        """No more copies."""

    def copy(self, direction: Direction, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """The blocking copy itself."""
        if direction is Direction.TO_HOST:
            self.device.copy_to_host(blocks, self.arena, slots)
        else:
            self.device.copy_to_device(blocks, self.arena, slots)


class InlineExecutor(Executor):
    """Copies in the calling thread."""

    async def run(self, direction: Direction, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        """See `Executor`."""
        await asyncio.sleep(0)
        try:
            self.copy(direction, blocks, slots)
        except Exception:
            return tuple(range(len(blocks)))
        return ()


class _Piece(NamedTuple):
    direction: Direction
    blocks: Sequence[int]
    slots: Sequence[int]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[bool]


class CopyExecutor(Executor):
    """Copies in `threads` threads of its own, started at the first copy."""

    def __init__(self, device: Device, arena: Arena, threads: int) -> None:
        super().__init__(device, arena, threads)
        self._pieces: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._workers: list[threading.Thread] = []

    async def run(self, direction: Direction, blocks: Sequence[int], slots: Sequence[int]) -> tuple[int, ...]:
        """See `Executor`."""
        if not self._workers:
            self._start()
        loop = asyncio.get_running_loop()
        step = self._step(len(blocks))
        starts = range(0, len(blocks), step)
        futures: list[asyncio.Future[bool]] = []
        for start in starts:
            future: asyncio.Future[bool] = loop.create_future()
            futures.append(future)
            self._pieces.put(_Piece(direction, blocks[start : start + step], slots[start : start + step], loop, future))
        await to_the_end(asyncio.gather(*futures))
        return tuple(
            j for start, future in zip(starts, futures, strict=True) if not future.result()
            for j in range(start, min(start + step, len(blocks)))
        )  # fmt: skip

    def _step(self, pairs: int) -> int:
        """Pairs a piece: shared among the threads, but none below PIECE bytes."""
        least = max(1, PIECE // max(1, self.device.layout.block_bytes))
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
                self.copy(piece.direction, piece.blocks, piece.slots)
                good = True
            except Exception:
                good = False
            try:
                piece.loop.call_soon_threadsafe(_finish, piece.done, good)
            except RuntimeError:
                return  # the loop is closed: nobody waits any more

    async def close(self) -> None:
        """Let the threads end; a thread stuck in a copy is left behind after CLOSE_LIMIT seconds (it is a daemon)."""
        workers, self._workers = self._workers, []
        for _ in workers:
            self._pieces.put(None)

        def join() -> None:
            for worker in workers:
                worker.join(CLOSE_LIMIT)

        if workers:
            await anyio.to_thread.run_sync(join)


def _finish(done: asyncio.Future[bool], good: bool) -> None:
    if not done.done():
        done.set_result(good)
