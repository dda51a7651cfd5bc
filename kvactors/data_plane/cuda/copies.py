"""Puts copies between a GPU and the arena on streams: large pieces by the copy engines, many in one
call, and small ones by a kernel.

A copy engine takes a few microseconds a copy at any size and leaves the multiprocessors to the
model, so neighbours are copied together (`merging`). The kernel is fast at any size, but takes a
few of the multiprocessors, and over PCIe for as long as the copy takes. Many small pieces are
therefore gathered on the device first (`gather`). The sizes from which on each way is as fast are
measured at start (`calibrate`)."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.copy_plan import (
    Columns,
    GpuPieces,
    HostRows,
    allocations_of,
    join_columns,
    plan_copies,
)
from kvactors.data_plane.cuda.driver import (
    HIGH_PRIORITY,
    NO_KERNEL,
    NON_BLOCKING,
    OUT_OF_MEMORY,
    UNTIMED,
    CudaDriver,
    CudaError,
    quietly,
)
from kvactors.data_plane.cuda.host_pin import LEAST, GatherBuffer, Scratch

# -- A direction's streams on a GPU, with the events and the memory of its operations.


FIRST_PAIRS = 1024
"""Pairs for which scratch memory is allocated at start. A larger operation replaces it with a
larger one."""

log = get_logger()


class GpuStream:
    """The streams of copies in one direction: one for the copy engines, and one for kernels.

    With a buffer for small pieces the kernels have a separate stream of high priority, so that
    they run while the engine's kernels have all multiprocessors and the copy engine has work.
    Without one, both are the same stream. Made and closed with the GPU's context current.

    Args:
        staging_bytes: of the buffer, 0 for none. Without memory for it there is none.
    """

    def __init__(
        self,
        driver: CudaDriver,
        *,
        to_device: bool,
        event_flags: int = UNTIMED,
        staging_bytes: int = 0,
    ) -> None:
        self.driver = driver
        self.to_device = to_device
        self.buffer: GatherBuffer | None = None
        self._event_flags = event_flags
        self._undo = ExitStack()
        self._events: list[int] = []
        self._scratches: list[Scratch] = []
        self._launched = self._staged = False
        try:
            self.stream = self.kernels = driver.read("cuStreamCreate", NON_BLOCKING)
            self._undo.callback(quietly, driver, "cuStreamDestroy", self.stream)
            self._scratches.append(Scratch(driver, 2 * FIRST_PAIRS))
            if staging_bytes >= 2 * LEAST:
                self._add_buffer(staging_bytes)
        except BaseException:
            self.close()
            raise

    def _add_buffer(self, nbytes: int) -> None:
        driver = self.driver
        try:
            self.buffer = GatherBuffer(driver, nbytes)
        except CudaError as error:
            if (error.function, error.code) != ("cuMemAlloc", OUT_OF_MEMORY):
                raise
            log.warning("no memory on the GPU to gather small pieces in", bytes=nbytes)
            return
        self._undo.callback(self.buffer.close)
        self.kernels = driver.read("cuStreamCreateWithPriority", NON_BLOCKING, HIGH_PRIORITY)
        self._undo.callback(quietly, driver, "cuStreamDestroy", self.kernels)
        self._joint = driver.read("cuEventCreate", UNTIMED)
        self._undo.callback(quietly, driver, "cuEventDestroy", self._joint)

    # -- order

    def _order(self, first: int, last: int) -> None:
        self.driver.call("cuEventRecord", self._joint, first)
        self.driver.call("cuStreamWaitEvent", last, self._joint, 0)

    def before_launch(self) -> None:
        """A kernel that reads or writes host slots itself comes next. CudaError."""
        if self._staged and not self.to_device:  # earlier copies may write the same slots
            self._order(self.stream, self.kernels)
            self._staged = False
        self._launched = True

    def note_staged(self) -> None:
        """Pieces went through the buffer."""
        self._staged = True
        self._launched |= self.to_device

    def record(self, event: int, *, whole: bool = False) -> None:
        """Record an event after everything that both streams have got. CudaError.

        Args:
            whole: whether any part of it may be missing, after an error.
        """
        last = self.stream
        if self.kernels != self.stream and (self._launched or whole):
            # the stream that needs not wait goes on with the next layers
            first, last = self.stream, self.kernels
            if not self.to_device:
                first, last = last, first
            self._order(first, last)
            self._launched = False
        self.driver.call("cuEventRecord", event, last)

    def wait_for(self, event: int) -> None:
        """Run what comes next after an event. CudaError."""
        self.driver.call("cuStreamWaitEvent", self.stream, event, 0)
        if self.kernels != self.stream:
            self.driver.call("cuStreamWaitEvent", self.kernels, event, 0)

    def settle(self, context: int) -> bool:
        """Wait without limit until no work on the streams runs any more. Returns whether the
        context is usable."""
        return all(
            self.driver.settle(context, one) for one in dict.fromkeys((self.stream, self.kernels))
        )

    # -- resources

    def take_event(self) -> int:
        """An event that no operation uses."""
        if self._events:
            return self._events.pop()
        event = self.driver.read("cuEventCreate", self._event_flags)
        self._undo.callback(quietly, self.driver, "cuEventDestroy", event)
        return event

    def take_scratch(self, count: int) -> Scratch:
        """Scratch memory for `count` numbers that no operation uses."""
        found = self._scratches.pop() if self._scratches else None
        if found is not None and found.count >= count:
            return found
        if found is not None:
            found.close()
        return Scratch(self.driver, max(2 * FIRST_PAIRS, 1 << (count - 1).bit_length()))

    def push_ids(
        self, scratch: Scratch, blocks: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> None:
        """Bring the numbers of n pairs to the device, in the order of the kernels: n blocks, then
        n slots."""
        n = len(blocks)
        scratch.host[:n], scratch.host[n : 2 * n] = blocks, slots
        scratch.push(2 * n, self.kernels)

    def give_back(self, events: Iterable[int], scratch: Scratch | None) -> None:
        """No part of an operation runs any more: take its resources back."""
        self._events += events
        if scratch is not None:
            self._scratches.append(scratch)

    def close(self) -> None:
        """Release every resource. No work may be running. Never raises."""
        while self._scratches:
            self._scratches.pop().close()
        self._undo.close()


# -- How pieces are copied: by the copy engines, by a kernel, or gathered first, and from which
# sizes on. The sizes follow from timings on this machine.


BATCH_FROM = 32 << 10
"""Bytes of a piece from which on it goes by the copy engines, unless measured otherwise."""

STAGE_FROM = 256 << 10
"""Bytes of an operation's small pieces from which on they are gathered, unless measured
otherwise."""

MERGE_FROM = 4
"""Blocks of a run from which on a piece of it is one copy, unless measured otherwise."""

NEVER = 1 << 62
LONGEST = 10.0
"""Seconds. A longer timing is impossible."""


class Choice(NamedTuple):
    """How pieces go.

    Attributes:
        batch_from: bytes of a piece from which on it goes by the copy engines.
        stage_from: bytes of the small pieces of an operation, or of a group of its layers, from
            which on they are gathered on the device.
        merge_from: neighbouring blocks from which on a piece of theirs is one copy.
    """

    batch_from: int = BATCH_FROM
    stage_from: int = STAGE_FROM
    merge_from: int = MERGE_FROM


class Timing(NamedTuple):
    """A measurement of 64 pieces there and back, the best of several."""

    piece: int
    batch: float
    kernel: float
    gathered: float = 0.0


class RunTiming(NamedTuple):
    """A measurement of a piece of neighbouring blocks there and back, the best of several."""

    blocks: int
    batch: float
    rectangle: float


def choose(timings: Sequence[Timing], runs: Sequence[RunTiming], pieces: int) -> Choice:
    """The choice that follows from timings."""
    kernels = [min(one.kernel, one.gathered or one.kernel) for one in timings]
    sizes = [one.piece for one in timings]
    batches = [one.batch for one in timings]
    gathered = [one for one in timings if one.gathered]
    return Choice(
        first_not_slower(
            sizes, batches, kernels, BATCH_FROM, beyond=2 * sizes[-1] if sizes else BATCH_FROM
        ),
        first_not_slower(
            [pieces * one.piece for one in gathered],
            [one.gathered for one in gathered],
            [one.kernel for one in gathered],
            STAGE_FROM,
        ),
        first_not_slower(
            [one.blocks for one in runs],
            [one.rectangle for one in runs],
            [one.batch for one in runs],
            MERGE_FROM,
        ),
    )


def first_not_slower(
    sizes: Sequence[int],
    seconds: Sequence[float],
    others: Sequence[float],
    otherwise: int,
    *,
    beyond: int = NEVER,
) -> int:
    """The smallest size from which on one way is never slower than the other one.

    Args:
        otherwise: the answer without timings, or if one is impossible.
        beyond: the answer if the way is slower at the largest size.
    """
    if not sizes or not all(0 < one < LONGEST for one in (*seconds, *others)):
        return otherwise
    best = beyond
    for size, one, other in zip(reversed(sizes), reversed(seconds), reversed(others), strict=True):
        if one > other:
            break
        best = size
    return best


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


class LaneCounts:
    """Totals of a direction: calls by kind, bytes and copies that failed."""

    def __init__(self) -> None:
        self.batches = self.launches = self.singles = self.bytes = self.errors = 0
        self.rectangles = self.staged = 0


class Copies:
    """Puts copies on streams. Made with the GPU's context current.

    Args:
        slots: the arena's address as the GPU sees it. The arena is pinned.
        undo: receives the clean-up of each resource.
        step: slots from one block to its neighbour, in the numbers that `enqueue` is given.
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
            slots: as many, in ascending order if neighbours are to be found.
            ids: the device's address of the n blocks and, behind them, the n slots, there by the
                time `gpu.kernels` gets so far.
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
