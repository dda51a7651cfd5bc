"""Copy engine between a GPU and the arena, with its own streams. Copies never block the loop, and
no thread waits for the GPU.

One thread for each direction puts copies on its stream. While copies are in flight the loop polls
the stream's events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import anyio

from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.data_plane.base import CLOSE_LIMIT, Direction, Progress
from kvactors.data_plane.cuda.calibrate import Calibration, calibrate
from kvactors.data_plane.cuda.copies import Copies, LaneCounts, RunTiming, Timing
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import FATAL, CudaError
from kvactors.data_plane.cuda.host_pin import STAGING_BYTES
from kvactors.data_plane.cuda.operations import (
    CopyStream,
    CudaEvent,
    Op,
    Operations,
    StreamEvents,
    StreamWait,
)
from kvactors.data_plane.engine import CopyEngine
from kvactors.device.arena import Arena
from kvactors.threads import in_thread

# -- Figures of copies between a GPU and the arena.


class CudaStatistics(NamedTuple):
    """Totals since `open`.

    Attributes:
        batches: calls for many copies.
        singles: calls for one copy.
        broken: why copies are impossible from now on, or None.
        staged: halves of the buffers for small pieces that were filled.
        rectangles: calls for the pieces of neighbouring blocks.
    """

    batches: int
    launches: int
    singles: int
    bytes_to_host: int
    bytes_to_device: int
    errors: int
    batch_from: int
    timings: tuple[Timing, ...]
    has_batch: bool
    has_kernel: bool
    broken: str | None
    staged: int
    rectangles: int
    stage_from: int
    merge_from: int
    run_timings: tuple[RunTiming, ...]
    staging_bytes: int


def statistics_of(
    lanes: Mapping[Direction, CopyStream],
    copies: Copies | None,
    calibration: Calibration,
    broken: str | None,
) -> CudaStatistics:
    """A moment's picture of an engine."""
    counts = {direction: lane.counts for direction, lane in lanes.items()}
    to_host = counts.get(Direction.TO_HOST, LaneCounts())
    to_device = counts.get(Direction.TO_DEVICE, LaneCounts())
    choice = None if copies is None else copies.choice
    buffers = [lane.gpu.buffer for lane in lanes.values()]
    return CudaStatistics(
        batches=to_host.batches + to_device.batches,
        launches=to_host.launches + to_device.launches,
        singles=to_host.singles + to_device.singles,
        bytes_to_host=to_host.bytes,
        bytes_to_device=to_device.bytes,
        errors=to_host.errors + to_device.errors,
        batch_from=0 if choice is None else choice.batch_from,
        timings=calibration.timings,
        has_batch=copies is not None and copies.has_batch,
        has_kernel=copies is not None and copies.kernels is not None,
        broken=broken,
        staged=to_host.staged + to_device.staged,
        rectangles=to_host.rectangles + to_device.rectangles,
        stage_from=0 if choice is None else choice.stage_from,
        merge_from=0 if choice is None else choice.merge_from,
        run_timings=calibration.runs,
        staging_bytes=sum(2 * buffer.half_bytes for buffer in buffers if buffer is not None),
    )


GROUP = 1 << 20
"""Bytes from which on a run of layers gets a separate event."""

ABANDONED: list[Any] = []
"""Memory that copies which never ended may still use. Never freed."""

log = get_logger()


class CudaCopyEngine(CopyEngine):
    """Copies by streams of a GPU. Every operation fails before `open`, and after an error of the
    driver, because the state of the GPU's work is then unknown.

    Args:
        batch_from: see `Choice`. None: measured by `open`.
        stage_from: likewise.
        merge_from: likewise.
        staging_bytes: device memory of each direction that small pieces are gathered in. 0: none.
    """

    device: CudaDevice

    def __init__(
        self,
        device: CudaDevice,
        arena: Arena,
        *,
        batch_from: int | None = None,
        stage_from: int | None = None,
        merge_from: int | None = None,
        staging_bytes: int = STAGING_BYTES,
        limit: float = CLOSE_LIMIT,
    ) -> None:
        super().__init__(device, arena, 2)
        settings = {
            "batch_from": batch_from,
            "stage_from": stage_from,
            "merge_from": merge_from,
        }
        self._set = {name: value for name, value in settings.items() if value is not None}
        self._staging_bytes = staging_bytes
        self._limit = limit
        self._undo = ExitStack()
        self._lanes: dict[Direction, CopyStream] = {}
        self._calibration = Calibration()
        self._copies: Copies | None = None
        self._broken: str | None = None
        self._lost = self._unacknowledged = False
        self._changed: Callable[[bool, bool], None] | None = None
        self._operations = Operations(device, self._break)
        self._events = StreamEvents(device, self._break)

    @property
    def trouble(self) -> str:
        return self._broken or ""

    # -- opening and closing

    async def open(self) -> None:
        """Pin the arena, make streams, load the kernels, measure. CudaError: nothing is left
        behind."""
        if not self._lanes and self._broken is None:
            await in_thread(self._open, "kvactors-cuda-open")

    def _open(self) -> None:
        with self.device.current():
            try:
                self._undo.callback(self._events.close)
                slots = self.device.register_arena(self.arena)
                self._undo.callback(self.device.unregister_arena, self.arena)
                copies = self._copies = Copies(self.device, self.arena, slots, self._undo)
                lanes = {}
                for direction in (Direction.TO_HOST, Direction.TO_DEVICE):
                    to_device = direction is Direction.TO_DEVICE
                    lanes[direction] = CopyStream(
                        copies,
                        self.device,
                        self.arena,
                        to_device=to_device,
                        staging_bytes=self._staging_bytes if copies.kernels is not None else 0,
                    )
                    self._undo.callback(lanes[direction].close)
                gpu = lanes[Direction.TO_DEVICE].gpu
                self._calibration = calibrate(copies, gpu, self._set)
                copies.split(self._calibration.choice, gpu.stream)
            except BaseException:
                self._copies = None
                self._undo.close()
                raise
        self._lanes = lanes

    async def close(self) -> None:
        """Wait for copies in flight, then release every resource. The memory of copies that do not
        end within the limit is never freed."""
        lanes, self._lanes = self._lanes, {}
        self._broken = self._broken or "closed"
        self._events.ended = True
        if not lanes:
            return
        settled = [asyncio.wrap_future(lane.workers.submit(lane.settle)) for lane in lanes.values()]
        with anyio.move_on_after(self._limit):
            await asyncio.gather(*settled)
            await self._operations.wait_ended()
        if (
            all(one.done() and not one.cancelled() and one.exception() is None for one in settled)
            and not self._operations.in_flight
        ):
            await in_thread(self._give_back, "kvactors-cuda-close")
        else:
            log.error("copies of a GPU did not end, keeping their memory", gpu=self.device.name)
            ABANDONED.extend((self._undo.pop_all(), self.device, self.arena, self.arena.view(0)))
            self.device.abandon()
        for lane in lanes.values():
            lane.workers.close()
        self._copies = None

    def _give_back(self) -> None:
        with ExitStack() as entered:
            try:
                entered.enter_context(self.device.current())
            except CudaError:  # perhaps temporary. Without a context no resource can be released
                with suppress(CudaError):
                    entered.enter_context(self.device.current())
            self._undo.close()

    def abandon_pending(self) -> None:
        """See `DataPlane`. The GPU may still execute the abandoned operations. `close` waits for
        them."""
        self._operations.abandon()

    # -- operations

    async def run(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        """See `CopyEngine`. All pairs arrive or none."""
        within = direction is Direction.WITHIN
        lane = self._lanes.get(Direction.TO_DEVICE if within else direction)
        if not len(blocks):
            return ()
        if lane is None or self._broken is not None:
            return tuple(range(len(blocks)))
        if within:
            return await self._copy_within(lane, blocks, slots)
        loop = asyncio.get_running_loop()
        load = direction is Direction.TO_DEVICE
        groups = self.layer_groups(len(blocks), GROUP) if load else self.layer_groups(1, 1 << 62)
        op = Op(blocks, slots, groups, progress if load else None, loop.create_future())
        self._operations.start(op, lane)
        good = await wait_uncancelled(op.done)
        return () if good else tuple(range(len(blocks)))

    async def _copy_within(
        self, lane: CopyStream, sources: Sequence[int], targets: Sequence[int]
    ) -> tuple[int, ...]:
        """Copy in a lane's thread, which waits for the GPU for microseconds."""
        copies = lane.workers.submit(partial(self.device.copy_blocks, sources, targets))
        try:
            await wait_uncancelled(asyncio.wrap_future(copies))
        except Exception as error:
            if lane.failed(error):
                self._break(error)
            return tuple(range(len(sources)))
        return ()

    # -- for engines

    def make_stream_wait(self, stream: int, blocks: Sequence[int], layer: int) -> bool:
        """See `EngineStreams`. Copies that are not on their stream yet are not waited for."""
        lane, missing = self._lanes.get(Direction.TO_DEVICE), set(blocks)
        loads = [
            op
            for op, its_lane in self._operations.in_flight.items()
            if its_lane is lane and not missing.isdisjoint(op.blocks)
        ]
        if any(op.failed or op.over or not op.submitted for op in loads):
            return False
        if missing.difference(*(op.blocks for op in loads)):
            return False
        with self.device.current():
            for op in loads:
                group = next(i for i, layers in enumerate(op.groups) if layer in layers)
                self.device.driver.call("cuStreamWaitEvent", stream, op.events[group], 0)
        return True

    def check_streams(self) -> None:
        """See `EngineStreams`: they are in reach."""

    def begin_stream_wait(self, stream: int, blocks: Sequence[int]) -> asyncio.Future[None] | None:
        lane = self._lanes.get(Direction.TO_DEVICE)
        if lane is None:
            return None
        wait = StreamWait(self.device, stream, blocks)
        self._operations.add_wait(wait, lane)
        return wait.done

    def record_event(self, stream: int) -> CudaEvent:
        return self._events.record(stream)

    # -- status

    def _break(self, error: BaseException) -> None:
        """Copy nothing more. Operations in flight end."""
        lost = isinstance(error, CudaError) and error.code in FATAL
        if self._broken is None or (lost and not self._lost):
            self._broken = str(error)
            self._lost |= lost
            self._unacknowledged |= lost
            log.error(
                "no more copies of this GPU's memory",
                gpu=self.device.name,
                error=str(error),
                memory_lost=lost,
            )
            if self._changed is not None:
                self._changed(False, lost)

    def on_status(self, changed: Callable[[bool, bool], None]) -> None:
        self._changed = changed
        if self._broken is not None:
            changed(False, self._unacknowledged)

    def acknowledge_loss(self) -> None:
        self._unacknowledged = False

    def statistics(self) -> CudaStatistics:
        """A moment's picture."""
        return statistics_of(self._lanes, self._copies, self._calibration, self._broken)
