"""Memory for the arguments of kernels."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.cuda.context import quietly
from kvactors.data_plane.cuda.driver import DEVICE_MAP, PORTABLE, CudaDriver


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
