"""Calibration at start: the piece size from which on the copy engines are as fast as the kernel on
this machine."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import numpy as np

from kvactors.data_plane.cuda.context import quietly
from kvactors.data_plane.cuda.copies import BATCH_FROM, Copies, Scratch
from kvactors.data_plane.cuda.driver import DEVICE_MAP, NOT_SUPPORTED, PORTABLE, TIMED, CudaError

SIZES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
"""Bytes of the pieces tried."""
PIECES = 64
TRIES = 3


class Timing(NamedTuple):
    """A measurement of `PIECES` pieces there and back, the best of `TRIES`.

    Attributes:
        piece: bytes of a piece.
        batch: seconds by the copy engines.
        kernel: seconds by the kernel.
    """

    piece: int
    batch: float
    kernel: float


def calibrate(copies: Copies, stream: int) -> tuple[int, tuple[Timing, ...]]:
    """The size, and the timings that it follows from. `BATCH_FROM` if there is no choice, or if the
    timings are unusable. Records in `copies` if the driver has no batched copies. Takes about 10 ms
    and waits for the stream. Raises CudaError."""
    with ExitStack() as undo:
        bench = _Bench(copies, stream, undo)
        if copies.has_batch:
            try:
                bench.seconds(bench.batch, SIZES[0])
            except CudaError as error:
                if error.code != NOT_SUPPORTED:
                    raise
                copies.has_batch = False
        if copies.kernels is None or not copies.has_batch:
            return BATCH_FROM, ()
        timings = tuple(
            Timing(size, bench.seconds(bench.batch, size), bench.seconds(bench.kernel, size))
            for size in SIZES
        )
    return choose(timings), timings


def choose(timings: tuple[Timing, ...]) -> int:
    """The smallest size from which on batches are never slower, or a size above all others if they
    are slower at the largest one. `BATCH_FROM` if a timing is impossible."""
    if not timings or not all(
        0 < seconds < 10 for one in timings for seconds in (one.batch, one.kernel)
    ):
        return BATCH_FROM
    best = 2 * timings[-1].piece
    for one in reversed(timings):
        if one.batch > one.kernel:
            break
        best = one.piece
    return best


class _Bench:
    def __init__(self, copies: Copies, stream: int, undo: ExitStack) -> None:
        self.copies, self.driver, self.stream = copies, copies.driver, stream
        driver, total = self.driver, PIECES * SIZES[-1]
        self.device = driver.read("cuMemAlloc", total)
        undo.callback(quietly, driver, "cuMemFree", self.device)
        self.host = driver.read("cuMemHostAlloc", total, PORTABLE | DEVICE_MAP)
        undo.callback(quietly, driver, "cuMemFreeHost", self.host)
        ctypes.memset(self.host, 0, total)
        self.mapped = driver.read("cuMemHostGetDevicePointer", self.host, 0)
        self.ids = Scratch(driver, PIECES + 3)
        undo.callback(self.ids.close)
        self.events = []
        for _ in range(2):
            self.events.append(driver.read("cuEventCreate", TIMED))
            undo.callback(quietly, driver, "cuEventDestroy", self.events[-1])
        undo.callback(
            driver.status, "cuStreamSynchronize", stream
        )  # no copy runs when the memory is freed

    def seconds(self, way: Callable[[int, bool], None], size: int) -> float:
        """The best time of a way to copy there and back."""
        self.ids.host[:3] = (self.device, size, 0)
        self.ids.host[3:] = np.arange(PIECES)
        self.ids.push(PIECES + 3, self.stream)
        return min(self._once(way, size) for _ in range(TRIES))

    def _once(self, way: Callable[[int, bool], None], size: int) -> float:
        self.driver.call("cuEventRecord", self.events[0], self.stream)
        way(size, True)
        way(size, False)
        self.driver.call("cuEventRecord", self.events[1], self.stream)
        self.driver.call("cuEventSynchronize", self.events[1])
        return self.driver.elapsed(*self.events)

    def batch(self, size: int, to_device: bool) -> None:
        """By the copy engines."""
        steps = np.arange(PIECES) * size
        on_device, on_host = self.device + steps, self.host + steps
        targets, sources = (on_device, on_host) if to_device else (on_host, on_device)
        self.copies.batch(targets, sources, np.full(PIECES, size), self.stream)

    def kernel(self, size: int, to_device: bool) -> None:
        """By the kernel: a table of one piece, and as many blocks as slots."""
        ids = self.ids.device + 24
        self.copies.launch(
            to_device, (self.ids.device, 1, ids, ids, PIECES, self.mapped, size), self.stream
        )
