"""Pins of host memory that several users in a process share."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.cuda.driver import (
    DEVICE_MAP,
    PORTABLE,
    UNTIMED,
    CudaContext,
    CudaDriver,
    CudaError,
    quietly,
)
from kvactors.errors import DeviceError

ALREADY_REGISTERED = 712

PINS: dict[int, list[int]] = {}
"""Bytes and users of the memory that this process has pinned, by address."""


class HostPin:
    """Host memory that the GPU may address, until `release`.

    Memory that its owner has pinned stays the owner's, who keeps it pinned as long as copies of it
    are made. Pins of the same memory are made by one thread at a time.

    Attributes:
        on_device: the address by which the GPU reaches the memory.

    Raises:
        DeviceError: the memory is pinned in part.
    """

    def __init__(self, context: CudaContext, address: int, nbytes: int) -> None:
        self._driver = driver = context.driver
        self._address = address
        self._counted = False
        pinned = PINS.get(address)
        if pinned is None:
            code = driver.status("cuMemHostRegister", address, nbytes, PORTABLE | DEVICE_MAP)
            if code == 0:
                pinned = PINS[address] = [nbytes, 0]
            elif code != ALREADY_REGISTERED:
                raise driver.error("cuMemHostRegister", code)
        if pinned is not None:
            pinned[1] += 1
            self._counted = True
        try:
            if not self._reaches(pinned, nbytes):
                raise DeviceError(
                    f"{nbytes} bytes of host memory are pinned in part: pin all of it or none"
                )
            self.on_device = driver.read("cuMemHostGetDevicePointer", address, 0)
        except BaseException:
            self.release()
            raise

    def _reaches(self, pinned: list[int] | None, nbytes: int) -> bool:
        """Whether the memory is pinned up to its last byte."""
        if pinned is not None:
            return pinned[0] >= nbytes
        try:
            self._driver.read("cuMemHostGetDevicePointer", self._address + nbytes - 1, 0)
        except CudaError:
            return False
        return True

    def release(self) -> None:
        """Unpin the memory if nothing else uses it. The context must be current."""
        if not self._counted:
            return
        self._counted = False
        pinned = PINS[self._address]
        pinned[1] -= 1
        if not pinned[1]:
            del PINS[self._address]
            quietly(self._driver, "cuMemHostUnregister", self._address)


# -- Blocks of a GPU by way of host memory that is allocated for the purpose, for tests and
# benchmarks.


class StagedBlocks:
    """Host memory for some blocks, one region for each piece."""

    def __init__(self, piece_bytes: NDArray[np.int64], count: int) -> None:
        self._memory = [np.zeros(max(1, count * int(size)), np.uint8) for size in piece_bytes]
        self._piece_bytes = piece_bytes
        self.regions = np.array([region.ctypes.data for region in self._memory], np.int64)
        self.numbers = np.arange(count)

    def copies(
        self, regions: NDArray[np.int64], blocks: Sequence[int], num_blocks: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Addresses on the device, addresses here, and bytes of the copies of some blocks."""
        ids = np.asarray(blocks, np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < num_blocks):
            raise ValueError(f"a block is out of range: there are {num_blocks}")
        sizes = np.broadcast_to(self._piece_bytes, (len(ids), len(regions)))
        on_device = regions + ids[:, None] * sizes
        on_host = self.regions + self.numbers[:, None] * sizes
        return on_device.ravel(), on_host.ravel(), sizes.ravel()


# -- Memory for the arguments of kernels.


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


class Half:
    """Half of a buffer.

    Attributes:
        filled: an event: the half has the bytes.
        empty: an event: the bytes have left the half.
        used: whether `empty` has been recorded.
    """

    def __init__(self, address: int, filled: int, empty: int) -> None:
        self.address = address
        self.filled = filled
        self.empty = empty
        self.used = False


class GatherBuffer:
    """Memory for small pieces in flight, in two halves that are used in turn.

    Made and closed with the GPU's context current.

    Args:
        nbytes: of both halves.
    """

    def __init__(self, driver: CudaDriver, nbytes: int) -> None:
        self._driver = driver
        self._undo = ExitStack()
        self._turn = 0
        self.half_bytes = nbytes // 2 // ALIGNMENT * ALIGNMENT
        try:
            memory = driver.read("cuMemAlloc", 2 * self.half_bytes)
            self._undo.callback(quietly, driver, "cuMemFree", memory)
            events = []
            for _ in range(4):
                events.append(driver.read("cuEventCreate", UNTIMED))
                self._undo.callback(quietly, driver, "cuEventDestroy", events[-1])
        except BaseException:
            self._undo.close()
            raise
        self._halves = [
            Half(memory + i * self.half_bytes, events[2 * i], events[2 * i + 1]) for i in range(2)
        ]

    @contextmanager
    def half(self, first: int, last: int) -> Iterator[Half]:
        """A half for bytes that `first` puts in and `last` takes out, two streams. Inside, the
        caller puts the first part on its stream, calls `hand_over`, and puts the second part on the
        other one. CudaError."""
        half = self._halves[self._turn]
        self._turn = 1 - self._turn
        if half.used:
            self._driver.call("cuStreamWaitEvent", first, half.empty, 0)
        yield half
        self._driver.call("cuEventRecord", half.empty, last)
        half.used = True

    def hand_over(self, half: Half, first: int, last: int) -> None:
        """Make the next work of `last` run after the work that `first` has. CudaError."""
        self._driver.call("cuEventRecord", half.filled, first)
        self._driver.call("cuStreamWaitEvent", last, half.filled, 0)

    def close(self) -> None:
        """Free the memory. It must not be in use. Never raises."""
        self._undo.close()
