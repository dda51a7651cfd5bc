"""Figures of copies between a GPU and the arena."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvactors.data_plane.base import Direction
from kvactors.data_plane.cuda.calibrate import Calibration
from kvactors.data_plane.cuda.choice import RunTiming, Timing
from kvactors.data_plane.cuda.copies import Copies, LaneCounts
from kvactors.data_plane.cuda.lane import Lane


class CudaStatistics(NamedTuple):
    """Totals since `open`.

    Attributes:
        batches: calls for many copies.
        launches: launches of the copy kernel.
        singles: calls for one copy.
        bytes_to_host: bytes put on the stream to the host, whether they arrived or not.
        bytes_to_device: bytes put on the stream to the device, whether they arrived or not.
        errors: operations that failed.
        batch_from: bytes from which on a piece goes by the copy engines.
        timings: the measurements behind that choice, empty if there were none.
        has_batch: whether the driver copies many pieces with one call.
        has_kernel: whether the copy kernel can be used.
        broken: why copies are impossible from now on, or None.
        staged: halves of the buffers for small pieces that were filled.
        rectangles: calls for the pieces of neighbouring blocks.
        stage_from: bytes of small pieces from which on they are gathered on the device.
        merge_from: neighbouring blocks from which on a piece of theirs is one copy.
        run_timings: the measurements behind that choice, empty if there were none.
        staging_bytes: device memory of the buffers for small pieces.
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
    lanes: Mapping[Direction, Lane],
    copies: Copies | None,
    calibration: Calibration,
    broken: str | None,
) -> CudaStatistics:
    """A moment's picture of an engine.

    Args:
        lanes: its directions, empty unless it is open.
        copies: the choices behind them, None unless it is open.
        calibration: the last one.
        broken: why copies are impossible, or None.
    """
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
