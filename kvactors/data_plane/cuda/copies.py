"""Puts copies between a GPU and the arena on streams: large pieces by the copy engines, many in one
call, and small ones by a kernel.

A copy engine takes a few microseconds a copy at any size and leaves the multiprocessors to the
model, so neighbours are copied together (`merging`). The kernel is fast at any size, but takes a
few of the multiprocessors, and over PCIe for as long as the copy takes. Many small pieces are
therefore gathered on the device first (`gather`). The sizes from which on each way is as fast are
measured at start (`calibrate`).
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.choice import Choice
from kvactors.data_plane.cuda.context import quietly
from kvactors.data_plane.cuda.driver import NO_KERNEL, CudaError
from kvactors.data_plane.cuda.gather import GatherBuffer
from kvactors.data_plane.cuda.gpu_stream import GpuStream
from kvactors.data_plane.cuda.merging import Columns, join_columns, plan_copies
from kvactors.data_plane.cuda.pieces import GpuPieces, HostRows, allocations_of
from kvactors.data_plane.cuda.scratch import Scratch

BATCH = 4096
"""Copies in one call. The driver holds its locks during the call, and the loop's queries wait for
them."""

ROWS = 4096
"""Pairs at most in a half of the buffer for small pieces."""

ROW_ALIGNMENT = 16
"""Bytes. The kernel moves vectors of 16 bytes where both sides are aligned."""

BLOCKS_OF_THREADS, THREADS = 8, 256
"""Size of the kernel's grid: 8 of an H100's 132 multiprocessors saturate its PCIe link."""

KERNELS = Path(__file__).with_name("kernels.ptx")
NAMES = {False: "kvactors_gather", True: "kvactors_scatter"}
"""By whether they copy to the device."""

log = get_logger()


class LaneCounts:
    """Totals of a direction: calls by kind, bytes and copies that failed."""

    def __init__(self) -> None:
        self.batches = self.launches = self.singles = self.bytes = self.errors = 0
        self.rectangles = self.staged = 0


class Copies:
    """Puts copies on streams. Made with the GPU's context current.

    Args:
        device: the GPU's regions.
        arena: the host slots.
        slots: the arena's address as the GPU sees it. The arena is pinned.
        undo: receives the clean-up of each resource.
        step: slots from one block to its neighbour, in the numbers that `enqueue` is given.

    Attributes:
        choice: how pieces go, from `split` on.

    Raises:
        CudaError: a call of the driver failed.
    """

    def __init__(
        self, device: GpuPieces, arena: HostRows, slots: int, undo: ExitStack, step: int = 1
    ) -> None:
        self.device = device
        self.arena = arena
        self.driver = device.driver
        self.slots = slots
        self.step = step * arena.stride
        self.has_batch = self.driver.has_batch
        self.kernels = self._load_kernels(undo)
        count = len(device.piece_bytes)
        self._table = Scratch(self.driver, 6 * count + ROWS)
        undo.callback(self._table.close)
        self._staged_table = self._table.device + 24 * count
        self._row_numbers = self._table.device + 48 * count
        self._allocations = allocations_of(self.driver, device.regions)
        self._max_pitch = self.driver.max_pitch(device.ordinal)
        self.choice = Choice()

    def _load_kernels(self, undo: ExitStack) -> dict[bool, int] | None:
        """The kernels, or None if this driver cannot make them out of their text."""
        try:
            module = self.driver.read("cuModuleLoadData", KERNELS.read_bytes())
        except CudaError as error:
            if error.code not in NO_KERNEL:
                raise
            log.warning("no kernels for this GPU: copies go piece by piece", error=str(error))
            return None
        undo.callback(quietly, self.driver, "cuModuleUnload", module)
        return {
            way: self.driver.read("cuModuleGetFunction", module, name.encode())
            for way, name in NAMES.items()
        }

    def split(self, choice: Choice, stream: int) -> None:
        """Decide how each piece goes. Pieces with gaps from one block to the next go by the copy
        engines, because the kernel has no number for the gap. Waits for the stream. CudaError."""
        if self.kernels is None:
            choice = choice._replace(batch_from=0)
        self.choice = choice
        device = self.device
        by_kernel = (device.piece_bytes < choice.batch_from) & (
            device.strides == device.piece_bytes
        )
        self._small, self._large = np.flatnonzero(by_kernel), np.flatnonzero(~by_kernel)
        sizes = device.piece_bytes[self._small]
        self._packed = np.concatenate(([0], np.cumsum(sizes)))
        count, small = len(device.piece_bytes), len(self._small)
        if not small:
            return
        table = self._table.host
        for first, offsets in ((0, device.offsets[self._small]), (3 * count, self._packed[:-1])):
            rows = np.stack([device.regions[self._small], sizes, offsets], axis=1)
            table[first : first + 3 * small] = rows.ravel()
        table[6 * count :] = np.arange(ROWS)
        self._table.push(len(table), stream)
        self.driver.call("cuStreamSynchronize", stream)

    @property
    def by_kernel(self) -> bool:
        """Whether some pieces go by the kernel."""
        return bool(self._small.size)

    def enqueue(
        self,
        blocks: NDArray[np.int64],
        slots: NDArray[np.int64],
        pieces: range,
        ids: int,
        gpu: GpuStream,
        counts: LaneCounts,
    ) -> None:
        """Copy some pieces of n pairs. CudaError: some of it may run nevertheless.

        Args:
            blocks: of the device.
            slots: as many, in ascending order if neighbours are to be found.
            pieces: in contract order.
            ids: the device's address of the n blocks and, behind them, the n slots, there by the
                time `gpu.kernels` gets so far.
            gpu: the streams, with the direction.
            counts: of the direction.
        """
        places = self.arena.address + slots * self.arena.stride
        first, last = np.searchsorted(self._small, (pieces.start, pieces.stop)).tolist()
        if last > first:
            self._enqueue_small(range(first, last), places, ids, gpu, counts)
        first, last = np.searchsorted(self._large, (pieces.start, pieces.stop)).tolist()
        if last > first:
            device, large = self.device, self._large[first:last]
            columns = Columns(
                device.regions[large],
                device.strides[large],
                device.piece_bytes[large],
                device.offsets[large],
            )
            self._by_engine(
                join_columns(columns, self._allocations[large]), blocks, places, gpu, counts
            )
        counts.bytes += len(blocks) * int(self.device.piece_bytes[pieces.start : pieces.stop].sum())

    def _enqueue_small(
        self,
        small: range,
        places: NDArray[np.int64],
        ids: int,
        gpu: GpuStream,
        counts: LaneCounts,
    ) -> None:
        n, packed = len(places), self._packed
        staged = (
            gpu.buffer is not None
            and n * int(packed[small.stop] - packed[small.start]) >= self.choice.stage_from
        )
        first = small.start
        while first < small.stop:
            last = small.stop
            if staged and gpu.buffer is not None:
                limit = packed[first] + gpu.buffer.half_bytes - ROW_ALIGNMENT
                last = min(last, int(np.searchsorted(packed, limit, side="right")) - 1)
            if last > first and staged and gpu.buffer is not None:
                self._stage(range(first, last), places, ids, gpu, gpu.buffer, counts)
            else:  # a piece larger than half of the buffer goes directly, too
                last = max(last, first + 1)
                gpu.before_launch()
                row = self._table.device + 24 * first
                arguments = (row, last - first, ids, ids + 8 * n, n, self.slots, self.arena.stride)
                self.launch(gpu.to_device, arguments, gpu.kernels)
                counts.launches += 1
            first = last

    def _stage(
        self,
        small: range,
        places: NDArray[np.int64],
        ids: int,
        gpu: GpuStream,
        buffer: GatherBuffer,
        counts: LaneCounts,
    ) -> None:
        """Copy small pieces through the buffer, in which each pair has a row."""
        chosen = self._small[small.start : small.stop]
        sizes, offsets = self.device.piece_bytes[chosen], self.device.offsets[chosen]
        base = int(self._packed[small.start])
        inside = self._packed[small.start : small.stop] - base
        row = -(-int(sizes.sum()) // ROW_ALIGNMENT) * ROW_ALIGNMENT
        columns = join_columns(
            Columns(inside, np.full(len(chosen), row), sizes, offsets),
            np.zeros(len(chosen), np.int64),
        )
        step = max(1, min(buffer.half_bytes // row, ROWS))
        table = self._staged_table + 24 * small.start
        first, last = gpu.kernels, gpu.stream
        if gpu.to_device:
            first, last = last, first
        for at in range(0, len(places), step):
            part = places[at : at + step]
            rows = np.arange(len(part))
            with buffer.half(first, last) as half:
                arguments = (
                    table,
                    len(chosen),
                    ids + 8 * at,
                    self._row_numbers,
                    len(part),
                    half.address - base,
                    row,
                )
                here = columns._replace(regions=columns.regions + half.address)
                if gpu.to_device:
                    self._by_engine(here, rows, part, gpu, counts)
                    buffer.hand_over(half, first, last)
                    self.launch(True, arguments, gpu.kernels)
                else:
                    self.launch(False, arguments, gpu.kernels)
                    buffer.hand_over(half, first, last)
                    self._by_engine(here, rows, part, gpu, counts)
            counts.staged += 1
        gpu.note_staged()

    def _by_engine(
        self,
        columns: Columns,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        gpu: GpuStream,
        counts: LaneCounts,
    ) -> None:
        to_device, stream = gpu.to_device, gpu.stream
        plan = plan_copies(
            columns, rows, places, self.step, max(2, self.choice.merge_from), self._max_pitch
        )
        on_device, on_host, sizes, rectangles = plan
        for rectangle in rectangles:
            self.driver.copy_rectangle(to_device, rectangle, stream)
            counts.rectangles += 1
        if self.has_batch:
            targets, sources = (on_device, on_host) if to_device else (on_host, on_device)
            for at in range(0, len(sizes), BATCH):
                part = slice(at, at + BATCH)
                self.batch(targets[part], sources[part], sizes[part], stream)
                counts.batches += 1
        else:
            self.driver.copy_singly(to_device, on_device, on_host, sizes, stream)
            counts.singles += len(sizes)

    def batch(
        self,
        targets: NDArray[np.int64],
        sources: NDArray[np.int64],
        sizes: NDArray[np.int64],
        stream: int,
    ) -> None:
        """One call for many copies, in any order. int64 arrays, read during the call. CudaError."""
        targets, sources, lengths = map(np.ascontiguousarray, (targets, sources, sizes))
        self.driver.copy_batch(
            targets.ctypes.data, sources.ctypes.data, lengths.ctypes.data, len(lengths), stream
        )

    def launch(self, to_device: bool, arguments: tuple[int, ...], stream: int) -> None:
        """Launch a kernel with the arguments of block_copy.cu. Raises CudaError."""
        assert self.kernels is not None
        values = (ctypes.c_int64 * len(arguments))(*arguments)
        base = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * len(arguments))(
            *(base + 8 * i for i in range(len(arguments)))
        )
        tiles = arguments[1] * arguments[4]
        grid = max(1, min(BLOCKS_OF_THREADS, -(-tiles // (THREADS // 32))))
        self.driver.call(
            "cuLaunchKernel",
            self.kernels[to_device],
            grid,
            1,
            1,
            THREADS,
            1,
            1,
            0,
            stream,
            pointers,
            None,
        )
