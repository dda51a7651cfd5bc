"""GpuSwapper: runs copies as child jobs and reports the pairs that arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

from kvactors.actor import Actor, ActorRef, Count, Message, Seconds, on
from kvactors.actor.clock import now
from kvactors.actor.context import MEMORY_LIMIT, Job, JobsRunOn
from kvactors.data_plane.base import DataPlane, Direction
from kvactors.gpu_swapper.messages import (
    Copied,
    CopiedWithin,
    Copy,
    CopyFinished,
    CopyProgress,
    CopyReply,
    CopyWithin,
    DataPlaneStatus,
)
from kvactors.types import indices_of


class SwapperStatistics(NamedTuple):
    """Copies by direction.

    Attributes:
        blocks_to_host, blocks_to_device: copied blocks.
        bytes_to_host, bytes_to_device: their bytes.
        seconds_to_host, seconds_to_device: seconds of these copies, added up.
        failed: blocks whose copy failed.
        in_flight: batches of copies in flight.
        blocks_within_device: blocks copied from one device block to another.
    """

    blocks_to_host: Count
    blocks_to_device: Count
    bytes_to_host: Count
    bytes_to_device: Count
    seconds_to_host: Seconds
    seconds_to_device: Seconds
    failed: Count
    in_flight: int
    blocks_within_device: Count = 0


class GpuSwapper(Actor):
    """Owns the copies in flight between the device and the arena, and within the device."""

    ROLE: ClassVar[str] = "gpu_swapper"
    SENDS: ClassVar[Mapping[str, tuple[type[Message], ...]]] = {
        "cpu_evictor": (Copied, CopyProgress, DataPlaneStatus),
        "prefix_index": (DataPlaneStatus, CopiedWithin),
    }

    def __init__(
        self,
        ref: ActorRef,
        *,
        plane: DataPlane,
        evictor: ActorRef[CopyReply],
        index: ActorRef[DataPlaneStatus | CopiedWithin],
    ) -> None:
        super().__init__(ref)
        self._plane = plane
        self._evictor = evictor
        self._index = index
        self._blocks = dict.fromkeys(Direction, 0)
        self._seconds = dict.fromkeys(Direction, 0.0)
        self._failed = self._in_flight = 0

    def started(self) -> None:
        """Subscribe to the data plane's status, including losses before the subscription."""
        self._plane.on_status(lambda *status: self.to_self(DataPlaneStatus(*status)))

    @on(DataPlaneStatus)
    def data_plane_status(self, message: DataPlaneStatus) -> None:
        """Forward the status. The index acts on losses and stalls only."""
        if message.memory_lost or not message.available:
            self.tell(self._index, message)
        if message.memory_lost:
            self._plane.acknowledge_loss()
        self.tell(self._evictor, message)

    @on(Copy)
    def copy(self, message: Copy) -> None:

        def progress(layers: int) -> None:
            self.to_self(CopyProgress(message.op, layers))

        arrived = progress if message.layerwise else None
        self._start(message, message.direction, message.blocks, message.slots, arrived)

    @on(CopyWithin)
    def copy_within(self, message: CopyWithin) -> None:
        self._start(message, Direction.WITHIN, message.sources, message.targets)

    def _start(
        self,
        message: Copy | CopyWithin,
        direction: Direction,
        blocks: tuple[int, ...],
        others: tuple[int, ...],
        progress: Callable[[int], None] | None = None,
    ) -> None:
        began, pairs = now(), len(blocks)
        self._in_flight += 1

        def ended(failed: Any) -> CopyFinished:
            checked = tuple(sorted(indices_of(failed, pairs)))
            return CopyFinished(message.op, direction, checked, pairs, now() - began)

        work = self._plane.copy(message.memory_generation, direction, blocks, others, progress)
        self.start_job(work, ended, lambda _: ended(range(pairs)))

    @on(CopyProgress)
    def copy_progress(self, message: CopyProgress) -> None:
        self.tell(self._evictor, message)

    @on(CopyFinished)
    def copy_finished(self, message: CopyFinished) -> None:
        direction, failed = message.direction, message.failed
        self._in_flight -= 1
        self._failed += len(failed)
        self._blocks[direction] += message.pairs - len(failed)
        self._seconds[direction] += message.seconds
        if direction is Direction.WITHIN:
            self.tell(self._index, CopiedWithin(message.op, failed))
        else:
            self.tell(self._evictor, Copied(message.op, failed))

    def job_limit(self, *, failed: bool) -> float:
        """Copies access memory that is handed out again."""
        return MEMORY_LIMIT

    def left_behind(self, jobs: Mapping[asyncio.Task[None], Job], *, restart: bool) -> None:
        """Device blocks cannot be withheld: the cache fails."""
        if restart:
            raise JobsRunOn(
                f"{len(jobs)} copies have not ended {MEMORY_LIMIT:g} s after a failure, and access "
                "device blocks"
            )

    def swapper_statistics(self) -> SwapperStatistics:
        size = self._plane.device.layout.block_bytes
        to_host, to_device = self._blocks[Direction.TO_HOST], self._blocks[Direction.TO_DEVICE]
        return SwapperStatistics(
            blocks_to_host=to_host,
            blocks_to_device=to_device,
            bytes_to_host=to_host * size,
            bytes_to_device=to_device * size,
            seconds_to_host=self._seconds[Direction.TO_HOST],
            seconds_to_device=self._seconds[Direction.TO_DEVICE],
            failed=self._failed,
            in_flight=self._in_flight,
            blocks_within_device=self._blocks[Direction.WITHIN],
        )
