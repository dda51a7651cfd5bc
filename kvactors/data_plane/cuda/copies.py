"""Puts copies between a GPU and the arena on streams: large pieces by the copy engines, many in one
call, and small ones by a kernel.

A copy engine takes a few microseconds a piece at any size and leaves the multiprocessors to the
model. The kernel is fast at any size, but takes a few of the multiprocessors. The size from which
on the engines are as fast is measured at start (`calibrate`).
"""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.context import quietly
from kvactors.data_plane.cuda.driver import DEVICE_MAP, NO_KERNEL, PORTABLE, CudaDriver, CudaError
from kvactors.data_plane.cuda.pieces import GpuPieces, HostRows, addresses

BATCH_FROM = 32 << 10
"""Bytes of a piece from which on it goes by the copy engines, unless measured otherwise."""

BATCH = 4096
"""Copies in one call. The driver holds its locks during the call, and the loop's queries wait for
them."""

BLOCKS_OF_THREADS, THREADS = 8, 256
"""Size of the kernel's grid: 8 of an H100's 132 multiprocessors saturate its PCIe link."""

KERNELS = Path(__file__).with_name("kernels.ptx")
NAMES = {False: "kvactors_gather", True: "kvactors_scatter"}
"""By whether they copy to the device."""

log = get_logger()


class Scratch:
    """Pinned host memory for `count` int64, and as much on the device. `host`: the host memory as
    an array. `device`: the address on the device."""

    def __init__(self, driver: CudaDriver, count: int) -> None:
        self.count = count
        self._driver = driver
        self._undo = ExitStack()
        try:
            pinned = driver.read("cuMemHostAlloc", 8 * count, PORTABLE | DEVICE_MAP)
            self._undo.callback(quietly, driver, "cuMemFreeHost", pinned)
            self.device = driver.read("cuMemAlloc", 8 * count)
            self._undo.callback(quietly, driver, "cuMemFree", self.device)
        except BaseException:
            self._undo.close()
            raise
        self.host: NDArray[np.int64] = np.frombuffer(
            memoryview((ctypes.c_int64 * count).from_address(pinned)), np.int64
        )
        self._pinned = pinned

    def push(self, count: int, stream: int) -> None:
        """Bring the first `count` numbers to the device, in the stream's order. CudaError."""
        self._driver.call("cuMemcpyHtoDAsync", self.device, self._pinned, 8 * count, stream)

    def close(self) -> None:
        """Free the memory. It must not be in use."""
        self._undo.close()


class LaneCounts:
    """Totals of a lane: calls by kind, bytes and copies that failed."""

    def __init__(self) -> None:
        self.batches = self.launches = self.singles = self.bytes = self.errors = 0


class Copies:
    """Puts copies on streams.

    Attributes:
        device: the GPU's regions.
        arena: the host slots.
        slots: the arena's address as the GPU sees it. The arena is pinned.
        batch_from: bytes of a piece. The device's context must be current. `undo` receives the
            clean-up of each resource. Raises CudaError.
    """

    def __init__(self, device: GpuPieces, arena: HostRows, slots: int, undo: ExitStack) -> None:
        self.device = device
        self.arena = arena
        self.driver = device.driver
        self.slots = slots
        self.has_batch = self.driver.has_batch
        self.kernels = self._load_kernels(undo)
        self._table = Scratch(self.driver, 3 * len(device.piece_bytes))
        undo.callback(self._table.close)
        self.batch_from = BATCH_FROM

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

    def split(self, batch_from: int, stream: int) -> None:
        """Have pieces of at least so many bytes go by the copy engines, and those with gaps from
        one block to the next, which the kernel has no number for. Waits for the stream.
        CudaError."""
        if self.kernels is None:
            batch_from = 0
        self.batch_from = batch_from
        device = self.device
        by_kernel = (device.piece_bytes < batch_from) & (device.strides == device.piece_bytes)
        self._small, self._large = np.flatnonzero(by_kernel), np.flatnonzero(~by_kernel)
        rows = np.stack([device.regions, device.piece_bytes, device.offsets], axis=1)[self._small]
        if rows.size:
            self._table.host[: rows.size] = rows.ravel()
            self._table.push(rows.size, stream)
            self.driver.call("cuStreamSynchronize", stream)

    @property
    def by_kernel(self) -> bool:
        """Whether some pieces go by the kernel."""
        return bool(self._small.size)

    def enqueue(
        self,
        to_device: bool,
        blocks: NDArray[np.int64],
        slots: NDArray[np.int64],
        pieces: range,
        ids: int,
        stream: int,
        counts: LaneCounts,
    ) -> None:
        """Copy some pieces (in contract order) of n pairs. ids: the device's address of the n
        blocks and, behind them, the n slots, there by the time the stream gets so far. CudaError:
        some of it may run nevertheless."""
        first, last = np.searchsorted(self._small, (pieces.start, pieces.stop)).tolist()
        if last > first:
            row = self._table.device + 24 * first
            n = len(blocks)
            self.launch(
                to_device,
                (row, last - first, ids, ids + 8 * n, n, self.slots, self.arena.stride),
                stream,
            )
            counts.launches += 1
        first, last = np.searchsorted(self._large, (pieces.start, pieces.stop)).tolist()
        if last > first:
            self._by_engine(
                to_device,
                addresses(self.device, self.arena, blocks, slots, self._large[first:last]),
                stream,
                counts,
            )
        counts.bytes += len(blocks) * int(self.device.piece_bytes[pieces.start : pieces.stop].sum())

    def _by_engine(
        self,
        to_device: bool,
        copies: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]],
        stream: int,
        counts: LaneCounts,
    ) -> None:
        on_device, on_host, sizes = copies
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
        lengths = np.ascontiguousarray(sizes)
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
