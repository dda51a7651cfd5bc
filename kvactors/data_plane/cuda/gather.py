"""Device memory that small pieces are gathered in, so that one copy moves many of them.

To the host a kernel collects the small pieces of some blocks in a half of the buffer, at the speed
of the GPU's memory, and a copy engine moves them. To the device it is the other way round. The
kernel works on one half while the copy engine works on the other: the two are on different
streams, ordered by events.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from kvactors.data_plane.cuda.context import quietly
from kvactors.data_plane.cuda.driver import UNTIMED, CudaDriver

STAGING_BYTES = 16 << 20
"""Bytes of a direction's buffer, unless set otherwise."""

LEAST = 4096
"""Bytes of the smallest half."""

ALIGNMENT = 256


class Half:
    """Half of a buffer.

    Attributes:
        address: on the device.
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
        driver: the GPU's.
        nbytes: of both halves.

    Attributes:
        half_bytes: of one half.

    Raises:
        CudaError: a call of the driver failed.
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
