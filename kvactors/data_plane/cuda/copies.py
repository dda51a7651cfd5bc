"""Puts copies between a GPU and the arena on streams: large pieces by the copy engines, many in one
call, and small ones by a kernel.

A copy engine takes a few microseconds a copy at any size and leaves the multiprocessors to the
model, so neighbours are copied together (`merging`). The kernel is fast at any size, but takes a
few of the multiprocessors, and over PCIe for as long as the copy takes. Many small pieces are
therefore gathered on the device first (`gather`). The sizes from which on each way is as fast are
measured at start (`calibrate`)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.copy_plan import (
    Columns,
    Numbers,
    Rectangle,
    join_columns,
    plan_copies,
)
from kvactors.data_plane.cuda.device import CudaDevice, CudaTensors
from kvactors.data_plane.cuda.driver import (
    DEVICE_MAP,
    HIGH_PRIORITY,
    MAX_PITCH,
    NO_KERNEL,
    NON_BLOCKING,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PORTABLE,
    TIMED,
    UNTIMED,
    CudaDriver,
    CudaError,
)
from kvactors.data_plane.cuda.host_pin import LEAST, GatherBuffer, Scratch

# -- A direction's streams on a GPU, with the events and the memory of its operations.


FIRST_PAIRS = 1024
"""Pairs for which scratch memory is allocated at start. A larger operation replaces it with a
larger one."""

log = get_logger()


class LaneCounts:
    """Totals of a direction: calls by kind, bytes and copies that failed."""

    def __init__(self) -> None:
        self.batches = self.launches = self.singles = self.bytes = self.errors = 0
        self.rectangles = self.staged = 0


@dataclass(eq=False)
class Transfer:
    """Copies of some pairs in one direction, and what they use on the GPU: an event for each group
    of pieces, reached when the group has been copied, and the memory of the pairs' numbers."""

    events: list[int] = field(default_factory=list, init=False)
    scratch: Scratch | None = field(default=None, init=False)


class GpuStream:
    """The streams of copies in one direction: one for the copy engines, and one for kernels. With a
    buffer for small pieces (of staging_bytes, 0 for none, and none without memory for it) the
    kernels have a separate stream of high priority, so that they run while the engine's kernels
    have all multiprocessors and the copy engine has work. Without one, both are the same stream.
    Made and closed with the GPU's context current."""

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
        self.counts = LaneCounts()
        self.buffer: GatherBuffer | None = None
        self._event_flags = event_flags
        self._undo = ExitStack()
        self._events: list[int] = []
        self._scratches: list[Scratch] = []
        self._launched = self._staged = False
        try:
            self.stream = self.kernels = driver.make(self._undo, "cuStreamCreate", NON_BLOCKING)
            self._scratches.append(Scratch(driver, 2 * FIRST_PAIRS))
            if staging_bytes >= 2 * LEAST:
                self._add_buffer(staging_bytes)
        except BaseException:
            self.close()
            raise

    def _add_buffer(self, nbytes: int) -> None:
        driver, undo = self.driver, self._undo
        try:
            self.buffer = GatherBuffer(driver, nbytes)
        except CudaError as error:
            if (error.function, error.code) != ("cuMemAlloc", OUT_OF_MEMORY):
                raise
            log.warning("no memory on the GPU to gather small pieces in", bytes=nbytes)
            return
        undo.callback(self.buffer.close)
        priority = NON_BLOCKING, HIGH_PRIORITY
        self.kernels = driver.make(undo, "cuStreamCreateWithPriority", *priority)
        self._joint = driver.make(undo, "cuEventCreate", UNTIMED)

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
        self._staged = True
        self._launched |= self.to_device

    def record(self, event: int, *, whole: bool = False) -> None:
        """Record an event after everything that both streams have got. whole: whether any part of
        it may be missing, after an error. CudaError."""
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
        return self.driver.make(self._undo, "cuEventCreate", self._event_flags)

    def take_scratch(self, count: int) -> Scratch:
        found = self._scratches.pop() if self._scratches else None
        if found is not None:
            if found.count >= count:
                return found
            found.close()
        return Scratch(self.driver, max(2 * FIRST_PAIRS, 1 << (count - 1).bit_length()))

    def push_ids(self, scratch: Scratch, blocks: Numbers, slots: Numbers) -> None:
        """Bring the numbers of n pairs to the device, in the order of the kernels: n blocks, then
        n slots."""
        ids = np.concatenate((blocks, slots))
        scratch.host[: len(ids)] = ids
        scratch.push(len(ids), self.kernels)

    def give_back(self, transfer: Transfer) -> None:
        """No part of a transfer runs any more: take its resources back."""
        self._events += transfer.events
        if transfer.scratch is not None:
            self._scratches.append(transfer.scratch)

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
    """A measurement of 64 pieces there and back, the best of several.

    Attributes:
        piece: bytes of a piece.
        batch: seconds by the copy engines.
        kernel: seconds by a kernel that reads and writes the host's memory.
        gathered: seconds by a kernel and one copy, 0 if the buffer is too small.
    """

    piece: int
    batch: float
    kernel: float
    gathered: float = 0.0


class RunTiming(NamedTuple):
    """A measurement of a piece of neighbouring blocks there and back, the best of several.

    Attributes:
        blocks: how many.
        batch: seconds with a copy for each.
        rectangle: seconds with one copy for all.
    """

    blocks: int
    batch: float
    rectangle: float


def choose(timings: Sequence[Timing], runs: Sequence[RunTiming], pieces: int) -> Choice:
    """The choice that follows from timings."""
    ways = [(one.piece, one.batch, min(one.kernel, one.gathered or one.kernel)) for one in timings]
    gathered = [(pieces * one.piece, one.gathered, one.kernel) for one in timings if one.gathered]
    merged = [(one.blocks, one.rectangle, one.batch) for one in runs]
    beyond = 2 * timings[-1].piece if timings else BATCH_FROM
    return Choice(
        first_not_slower(ways, BATCH_FROM, beyond=beyond),
        first_not_slower(gathered, STAGE_FROM),
        first_not_slower(merged, MERGE_FROM),
    )


def first_not_slower(
    timings: Sequence[tuple[int, float, float]], otherwise: int, *, beyond: int = NEVER
) -> int:
    """The smallest size from which on one way is never slower than the other one. timings: the
    seconds of each way, by ascending size. otherwise: the answer without timings, or if one is
    impossible. beyond: the answer if the way is slower at the largest size."""
    if not timings or not all(0 < one < LONGEST for _, *both in timings for one in both):
        return otherwise
    best = beyond
    for size, one, other in reversed(timings):
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


class Copies:
    """Puts copies on its streams, which it has by whether they are to the device. Made with the
    GPU's context current. address: of the first host slot. stride: bytes from a slot to the next
    one, in the numbers that `put` is given. mapped: the address of the slots, which are pinned, as
    the GPU sees it. step: bytes from the slot of a block to that of its neighbour. undo: receives
    the clean-up of each resource."""

    def __init__(
        self,
        device: CudaDevice | CudaTensors,
        address: int,
        stride: int,
        mapped: int,
        step: int,
        undo: ExitStack,
        *,
        staging_bytes: int,
        event_flags: int = UNTIMED,
    ) -> None:
        self.device = device
        self.driver = driver = device.driver
        self._address, self._stride, self._mapped, self._step = address, stride, mapped, step
        self.has_batch = driver.has_batch
        self.kernels = self._load_kernels(undo)
        count = len(device.piece_bytes)
        self._table = Scratch(driver, 6 * count + ROWS)
        undo.callback(self._table.close)
        self._staged_table = self._table.device + 24 * count
        self._row_numbers = self._table.device + 48 * count
        # a separate number for each region whose allocation the driver does not tell
        bases = [driver.allocation(address) for address in device.regions.tolist()]
        self._allocations = np.array([base or -1 - i for i, base in enumerate(bases)], np.int64)
        self._max_pitch = driver.read_int("cuDeviceGetAttribute", MAX_PITCH, device.ordinal)
        self.choice = Choice()
        self.streams: dict[bool, GpuStream] = {}
        for to_device in (False, True):
            gpu = self.streams[to_device] = GpuStream(
                driver,
                to_device=to_device,
                event_flags=event_flags,
                staging_bytes=staging_bytes if self.kernels is not None else 0,
            )
            undo.callback(gpu.close)

    def _load_kernels(self, undo: ExitStack) -> dict[bool, int] | None:
        """The kernels, or None if this driver cannot make them out of their text."""
        try:
            module = self.driver.make(undo, "cuModuleLoadData", KERNELS.read_bytes())
        except CudaError as error:
            if error.code not in NO_KERNEL:
                raise
            log.warning("no kernels for this GPU: copies go piece by piece", error=str(error))
            return None
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

    def prepare(self, transfer: Transfer, pairs: int, groups: int, gpu: GpuStream) -> None:
        """Take what a transfer needs. CudaError: nothing was begun, and it may have got a part."""
        for _ in range(groups):
            transfer.events.append(gpu.take_event())
        if self._small.size:
            transfer.scratch = gpu.take_scratch(2 * pairs)

    def put(
        self,
        transfer: Transfer,
        blocks: Numbers,
        slots: Numbers,
        groups: Sequence[range],
        gpu: GpuStream,
    ) -> None:
        """Put the copies of n pairs on a stream, and an event after each group of pieces (in
        contract order). CudaError: some of it may run nevertheless."""
        order = np.argsort(slots, kind="stable")  # neighbours are copied together
        blocks, slots, ids = blocks[order], slots[order], 0
        if transfer.scratch is not None:
            gpu.push_ids(transfer.scratch, blocks, slots)
            ids = transfer.scratch.device
        for pieces, event in zip(groups, transfer.events, strict=True):
            if len(blocks):
                self._enqueue(blocks, slots, pieces, ids, gpu)
            gpu.record(event)

    def _enqueue(
        self, blocks: Numbers, slots: Numbers, pieces: range, ids: int, gpu: GpuStream
    ) -> None:
        """Copy some pieces. ids: the device's address of the n blocks and, behind them, the n
        slots, there by the time `gpu.kernels` gets so far."""
        device, places = self.device, self._address + slots * self._stride
        first, last = np.searchsorted(self._small, (pieces.start, pieces.stop)).tolist()
        if last > first:
            self._enqueue_small(range(first, last), places, ids, gpu)
        first, last = np.searchsorted(self._large, (pieces.start, pieces.stop)).tolist()
        if last > first:
            large = self._large[first:last]
            tables = device.regions, device.strides, device.piece_bytes, device.offsets
            columns = Columns(*(table[large] for table in tables))
            joined = join_columns(columns, self._allocations[large])
            self._by_engine(joined, blocks, places, gpu)
        sizes = device.piece_bytes[pieces.start : pieces.stop]
        gpu.counts.bytes += len(blocks) * int(sizes.sum())

    def _enqueue_small(self, small: range, places: Numbers, ids: int, gpu: GpuStream) -> None:
        n, packed = len(places), self._packed
        buffer = gpu.buffer
        if n * int(packed[small.stop] - packed[small.start]) < self.choice.stage_from:
            buffer = None
        first = small.start
        while first < small.stop:
            last = small.stop
            if buffer is not None:
                limit = packed[first] + buffer.half_bytes - ROW_ALIGNMENT
                last = min(last, int(np.searchsorted(packed, limit, side="right")) - 1)
            if buffer is not None and last > first:
                self._stage(range(first, last), places, ids, gpu, buffer)
            else:  # a piece larger than half of the buffer goes directly, too
                last = max(last, first + 1)
                gpu.before_launch()
                row = self._table.device + 24 * first
                arguments = (row, last - first, ids, ids + 8 * n, n, self._mapped, self._stride)
                self.launch(gpu.to_device, arguments, gpu.kernels)
                gpu.counts.launches += 1
            first = last

    def _stage(
        self, small: range, places: Numbers, ids: int, gpu: GpuStream, buffer: GatherBuffer
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
        table, numbers = self._staged_table + 24 * small.start, self._row_numbers

        def by_kernel(at: int, half: int) -> None:
            pairs = len(places[at : at + step])
            pieces = (table, len(chosen), ids + 8 * at, numbers, pairs, half - base, row)
            self.launch(gpu.to_device, pieces, gpu.kernels)

        def by_engine(at: int, half: int) -> None:
            part = places[at : at + step]
            here = columns._replace(regions=columns.regions + half)
            self._by_engine(here, np.arange(len(part)), part, gpu)

        for at in range(0, len(places), step):
            put, take = (gpu.kernels, partial(by_kernel, at)), (gpu.stream, partial(by_engine, at))
            if gpu.to_device:
                put, take = take, put
            buffer.carry(*put, *take)
            gpu.counts.staged += 1
        gpu.note_staged()

    def _by_engine(self, columns: Columns, rows: Numbers, places: Numbers, gpu: GpuStream) -> None:
        to_device, stream = gpu.to_device, gpu.stream
        plan = plan_copies(
            columns, rows, places, self._step, max(2, self.choice.merge_from), self._max_pitch
        )
        on_device, on_host, sizes, rectangles = plan
        for rectangle in rectangles:
            self.driver.copy_rectangle(to_device, rectangle, stream)
        gpu.counts.rectangles += len(rectangles)
        if self.has_batch:
            for at in range(0, len(sizes), BATCH):
                part = slice(at, at + BATCH)
                self.batch(to_device, on_device[part], on_host[part], sizes[part], stream)
                gpu.counts.batches += 1
        else:
            self.driver.copy_singly(to_device, on_device, on_host, sizes, stream)
            gpu.counts.singles += len(sizes)

    def batch(
        self, to_device: bool, on_device: Numbers, on_host: Numbers, sizes: Numbers, stream: int
    ) -> None:
        """One call for many copies, in any order. The arrays are read during the call.
        CudaError."""
        targets, sources = (on_device, on_host) if to_device else (on_host, on_device)
        targets, sources, sizes = map(np.ascontiguousarray, (targets, sources, sizes))
        addresses = targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data
        self.driver.copy_batch(*addresses, len(sizes), stream)

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
        shape = (grid, 1, 1, THREADS, 1, 1, 0)
        kernel = self.kernels[to_device]
        self.driver.call("cuLaunchKernel", kernel, *shape, stream, pointers, None)


# -- Calibration at start: how pieces of which sizes are copied fastest on this machine.


SIZES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
"""Bytes of the pieces tried."""
RUNS = (2, 4, 8, 16, 32)
"""Neighbouring blocks tried, with pieces of `RUN_PIECE` bytes."""
RUN_PIECE = 32 << 10
PIECES = 64
TRIES = 3


class Calibration(NamedTuple):
    """The measurements, and the choice that follows from them."""

    choice: Choice = Choice()
    timings: tuple[Timing, ...] = ()
    runs: tuple[RunTiming, ...] = ()


def calibrate(
    copies: Copies, gpu: GpuStream, given: Mapping[str, int] | None = None
) -> Calibration:
    """Measure, for about 20 ms, and find out whether the driver has batched copies. Waits for the
    streams. given: fields of `Choice` that need not be measured."""
    known = given or {}
    with ExitStack() as undo:
        bench = _Bench(copies, gpu, undo)
        if copies.has_batch:
            try:
                bench.seconds(bench.batch, SIZES[0])
            except CudaError as error:
                if error.code != NOT_SUPPORTED:
                    raise
                copies.has_batch = False
        if not copies.has_batch:  # a call for each copy is slower than one for a rectangle
            return Calibration(Choice(merge_from=2)._replace(**known))
        runs = tuple(
            RunTiming(
                blocks,
                bench.seconds(bench.batch, RUN_PIECE, blocks),
                bench.seconds(bench.rectangle, RUN_PIECE, blocks),
            )
            for blocks in (() if "merge_from" in known else RUNS)
        )
        timings: tuple[Timing, ...] = ()
        gathers = "stage_from" not in known
        if copies.kernels is not None and (gathers or "batch_from" not in known):
            timings = tuple(
                Timing(
                    size,
                    bench.seconds(bench.batch, size),
                    bench.seconds(bench.kernel, size),
                    bench.seconds(bench.gathered, size)
                    if gathers and bench.has_room(size)
                    else 0.0,
                )
                for size in SIZES
            )
    return Calibration(choose(timings, runs, PIECES)._replace(**known), timings, runs)


class _Bench:
    def __init__(self, copies: Copies, gpu: GpuStream, undo: ExitStack) -> None:
        self.copies, self.driver, self.gpu, self.stream = copies, copies.driver, gpu, gpu.stream
        driver, total = self.driver, PIECES * SIZES[-1]
        self.device = driver.make(undo, "cuMemAlloc", total)
        self.host = driver.make(undo, "cuMemHostAlloc", total, PORTABLE | DEVICE_MAP)
        ctypes.memset(self.host, 0, total)
        self.mapped = driver.read("cuMemHostGetDevicePointer", self.host, 0)
        self.ids = Scratch(driver, PIECES + 3)
        undo.callback(self.ids.close)
        self.events = [driver.make(undo, "cuEventCreate", TIMED) for _ in range(2)]
        # no copy runs when the memory is freed
        for stream in dict.fromkeys((gpu.stream, gpu.kernels)):
            undo.callback(driver.status, "cuStreamSynchronize", stream)

    def has_room(self, size: int) -> bool:
        """Whether half of the buffer is large enough for the pieces."""
        return self.gpu.buffer is not None and self.gpu.buffer.half_bytes >= PIECES * size

    def seconds(
        self, way: Callable[[int, bool, int], None], size: int, pieces: int = PIECES
    ) -> float:
        """The best time of a way to copy pieces there and back."""
        self.ids.host[:3] = (self.device, size, 0)
        self.ids.host[3:] = np.arange(PIECES)
        self.ids.push(PIECES + 3, self.stream)
        return min(self._once(way, size, pieces) for _ in range(TRIES))

    def _once(self, way: Callable[[int, bool, int], None], size: int, pieces: int) -> float:
        self.driver.call("cuEventRecord", self.events[0], self.stream)
        way(size, True, pieces)
        way(size, False, pieces)
        self.driver.call("cuEventRecord", self.events[1], self.stream)
        self.driver.call("cuEventSynchronize", self.events[1])
        milliseconds = ctypes.c_float()
        self.driver.call("cuEventElapsedTime", ctypes.byref(milliseconds), *self.events)
        return milliseconds.value / 1000

    def batch(self, size: int, to_device: bool, pieces: int) -> None:
        """By the copy engines."""
        steps = np.arange(pieces) * size
        sizes = np.full(pieces, size)
        self.copies.batch(to_device, self.device + steps, self.host + steps, sizes, self.stream)

    def rectangle(self, size: int, to_device: bool, pieces: int) -> None:
        """By the copy engines, all pieces at once."""
        self.driver.copy_rectangle(
            to_device, Rectangle(self.device, self.host, size, pieces, size, 2 * size), self.stream
        )

    def kernel(self, size: int, to_device: bool, pieces: int) -> None:
        """By the kernel."""
        self._launch(to_device, self.mapped, size, pieces, self.stream)

    def gathered(self, size: int, to_device: bool, pieces: int) -> None:
        """By the kernel and one copy."""
        gpu, nbytes, host = self.gpu, pieces * size, self.host

        def by_kernel(half: int) -> None:
            self._launch(to_device, half, size, pieces, gpu.kernels)

        def by_engine(half: int) -> None:
            if to_device:
                self.driver.call("cuMemcpyHtoDAsync", half, host, nbytes, gpu.stream)
            else:
                self.driver.call("cuMemcpyDtoHAsync", host, half, nbytes, gpu.stream)

        put, take = (gpu.kernels, by_kernel), (gpu.stream, by_engine)
        if to_device:
            put, take = take, put
        assert gpu.buffer is not None
        gpu.buffer.carry(*put, *take)

    def _launch(self, to_device: bool, slots: int, size: int, pieces: int, stream: int) -> None:
        """A table of one piece, and as many blocks as slots."""
        ids = self.ids.device + 24
        self.copies.launch(to_device, (self.ids.device, 1, ids, ids, pieces, slots, size), stream)
