"""Pins of host memory that several users in a process share."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.cuda.driver import (
    DEVICE_MAP,
    PORTABLE,
    UNTIMED,
    CudaContext,
    CudaDriver,
    quietly,
)
from kvactors.errors import DeviceError

ALREADY_REGISTERED = 712

PINS: dict[int, list[int]] = {}
"""Bytes and users of the memory that this process has pinned, by address."""


class HostPin:
    """Host memory that the GPU may address (at `on_device`) until `release`. Memory that its owner
    has pinned stays the owner's, who keeps it pinned as long as copies of it are made. Pins of the
    same memory are made by one thread at a time. DeviceError if the memory is pinned in part."""

    def __init__(self, context: CudaContext, address: int, nbytes: int) -> None:
        self._driver = driver = context.driver
        self._address = address
        pinned = PINS.get(address)
        if pinned is None:
            code = driver.status("cuMemHostRegister", address, nbytes, PORTABLE | DEVICE_MAP)
            if code == 0:
                pinned = PINS[address] = [nbytes, 0]
            elif code != ALREADY_REGISTERED:
                raise driver.error("cuMemHostRegister", code)
        self._pinned = pinned
        if pinned is not None:
            pinned[1] += 1
        try:
            if not self._reaches(nbytes):
                raise DeviceError(
                    f"{nbytes} bytes of host memory are pinned in part: pin all of it or none"
                )
            self.on_device = driver.read("cuMemHostGetDevicePointer", address, 0)
        except BaseException:
            self.release()
            raise

    def _reaches(self, nbytes: int) -> bool:
        """Whether the memory is pinned up to its last byte."""
        if self._pinned is not None:
            return self._pinned[0] >= nbytes
        last = ctypes.byref(ctypes.c_uint64())
        return not self._driver.status(
            "cuMemHostGetDevicePointer", last, self._address + nbytes - 1, 0
        )

    def release(self) -> None:
        """Unpin the memory if nothing else uses it. The context must be current."""
        pinned, self._pinned = self._pinned, None
        if pinned is None:
            return
        pinned[1] -= 1
        if not pinned[1]:
            del PINS[self._address]
            quietly(self._driver, "cuMemHostUnregister", self._address)


# -- Memory for the arguments of kernels.


class Scratch:
    """Pinned host memory for `count` int64, and as much on the device. `host`: the host memory as
    an array. `device`: the address on the device."""

    def __init__(self, driver: CudaDriver, count: int) -> None:
        self.count = count
        self._driver = driver
        self._undo = ExitStack()
        try:
            flags = PORTABLE | DEVICE_MAP
            self._pinned = driver.make(self._undo, "cuMemHostAlloc", 8 * count, flags)
            self.device = driver.make(self._undo, "cuMemAlloc", 8 * count)
        except BaseException:
            self._undo.close()
            raise
        self.host: NDArray[np.int64] = np.frombuffer(
            memoryview((ctypes.c_int64 * count).from_address(self._pinned)), np.int64
        )

    def push(self, count: int, stream: int) -> None:
        """Bring the first `count` numbers to the device, in the stream's order. CudaError."""
        self._driver.call("cuMemcpyHtoDAsync", self.device, self._pinned, 8 * count, stream)

    def close(self) -> None:
        self._undo.close()


# -- Device memory that small pieces are gathered in, so that one copy moves many of them.
#
# To the host a kernel collects the small pieces of some blocks in a half of the buffer, at the
# speed of the GPU's memory, and a copy engine moves them. To the device it is the other way round.
# The kernel works on one half while the copy engine works on the other: the two are on different
# streams, ordered by events.


STAGING_BYTES = 16 << 20
"""Bytes of a direction's buffer, unless set otherwise."""

LEAST = 4096
"""Bytes of the smallest half."""

ALIGNMENT = 256


class GatherBuffer:
    """Memory for small pieces in flight, in two halves of together `nbytes` that are used in turn.
    Made and closed with the GPU's context current."""

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self._driver = driver
        self._undo = ExitStack()
        self.half_bytes = nbytes // 2 // ALIGNMENT * ALIGNMENT
        # address of each half, the event that it has been filled, and the event that it is empty
        self._halves: deque[tuple[int, int, int]] = deque()
        try:
            memory = driver.make(self._undo, "cuMemAlloc", 2 * self.half_bytes)
            for address in (memory, memory + self.half_bytes):
                filled, empty = (
                    driver.make(self._undo, "cuEventCreate", UNTIMED) for _ in range(2)
                )
                self._halves.append((address, filled, empty))
        except BaseException:
            self._undo.close()
            raise

    def carry(
        self, first: int, put: Callable[[int], None], last: int, take: Callable[[int], None]
    ) -> None:
        """Have bytes put into a half by work on the stream `first`, and taken out by work on the
        stream `last`. `put` and `take` get the half's address, and put the work on the streams.
        CudaError."""
        address, filled, empty = self._halves[0]
        self._halves.rotate()
        self._driver.call("cuStreamWaitEvent", first, empty, 0)  # no wait the first time
        put(address)
        self._driver.call("cuEventRecord", filled, first)
        self._driver.call("cuStreamWaitEvent", last, filled, 0)
        take(address)
        self._driver.call("cuEventRecord", empty, last)

    def close(self) -> None:
        """Free the memory. It must not be in use. Never raises."""
        self._undo.close()
