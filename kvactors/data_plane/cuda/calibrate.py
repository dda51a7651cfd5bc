"""Calibration at start: how pieces of which sizes are copied fastest on this machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from kvactors.data_plane.cuda.copies import Choice, Copies, GpuStream, RunTiming, Timing, choose
from kvactors.data_plane.cuda.copy_plan import Rectangle
from kvactors.data_plane.cuda.driver import DEVICE_MAP, NOT_SUPPORTED, PORTABLE, TIMED, CudaError
from kvactors.data_plane.cuda.host_pin import Scratch

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
