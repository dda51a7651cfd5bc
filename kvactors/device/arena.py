"""The host arena: one slot per block, page aligned, touched once at start."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np

from kvactors.actor.log import get_logger
from kvactors.device.numa import bind
from kvactors.native import touch
from kvactors.threads import end_at_exit

PAGE = 4096

TOUCH_PIECE = 64 << 20
"""Bytes touched between two checks for a stop."""

log = get_logger()


def slot_stride(block_bytes: int, trailer: int) -> int:
    """Bytes that a slot takes: a block and its trailer, in whole pages."""
    return -(-(block_bytes + trailer) // PAGE) * PAGE


class HostSlots:
    """Host slots by number, in the memory of this process or of others.

    Attributes:
        num_slots: number of slots in each process.
        block_bytes: bytes of one process's share of a block.
        in_use: slots that jobs of failed actors still access (a call to a store that does not
            return), with the number of such jobs. Such slots are not handed out.
        kept: whether the memory must stay mapped after `close`.
        trouble: why the memory is not as the settings ask for, empty if it is.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.trouble = ""
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.in_use: Counter[int] = Counter()
        self.kept = False

    def withhold(self, slots: Iterable[int]) -> Callable[[], None]:
        """Keep slots from being handed out until the returned function is called."""
        held = Counter(slots)
        self.in_use.update(held)

        def release() -> None:
            self.in_use.subtract(held)
            for slot in held:
                if not self.in_use[slot]:
                    del self.in_use[slot]

        return release

    def keep(self) -> None:
        """Leave the memory mapped until the process ends, because a thread may still access it."""
        self.kept = True

    def close(self) -> None:
        """Free the memory, if it belongs to this process."""


class Arena(HostSlots):
    """Host slots in the memory of this process.

    The slots are contiguous from `address`. Each takes `stride` bytes: block_bytes and the trailer,
    rounded up to whole pages.

    Args:
        num_slots: number of slots.
        block_bytes: bytes of a block.
        pinned: whether to lock the pages in memory. `locked` tells whether the system allowed it.
        trailer: bytes right after each block that a store may use for the block's metadata.
        numa_node: the NUMA node that the memory comes from, None for the system's choice.

    Raises:
        ConfigError: the memory cannot be bound to this node.
    """

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        *,
        pinned: bool = False,
        trailer: int = 0,
        numa_node: int | None = None,
    ) -> None:
        super().__init__(num_slots, block_bytes)
        self.trailer = trailer
        self.stride = slot_stride(block_bytes, trailer)
        self.pinned = pinned
        self.locked = False
        self._stopped = self._touching = self._closed = False
        self._map = mmap.mmap(-1, max(1, num_slots) * self.stride)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        if numa_node is not None:
            bind(self.address, len(self._map), numa_node)
        end_at_exit(self)

    def end(self, limit: float) -> None:
        """Stop a thread that touches, at the interpreter's exit. See `threads.Ending`."""
        until = time.monotonic() + limit
        self._stopped = True
        while self._touching and time.monotonic() < until:
            time.sleep(0.001)

    def touch(self) -> None:
        """Fault in every page, and lock it if the arena is pinned.

        The call blocks for about a second a gigabyte, so it belongs in a thread. `stop_touching`
        ends it early.
        """
        self._touching = True
        try:
            if not self._closed:
                self._touch(self.num_slots * self.stride)
        finally:
            self._touching = False

    def _touch(self, size: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True) if self.pinned else None
        for start in range(0, size, TOUCH_PIECE):
            if self._stopped:
                return
            piece = min(TOUCH_PIECE, size - start)
            touch(self.address + start, piece)
            if libc is None:
                continue
            self.locked = (
                libc.mlock(ctypes.c_void_p(self.address + start), ctypes.c_size_t(piece)) == 0
            )
            if not self.locked:
                number = ctypes.get_errno()
                self.trouble = (
                    f"host.pinned: the system refuses to lock {size} bytes of host memory "
                    f"({os.strerror(number)}): raise the limit of locked memory (ulimit -l)"
                )
                log.warning("the arena could not be pinned", bytes=size, errno=number)
                libc = None

    def stop_touching(self) -> None:
        """Make a `touch` that runs in another thread return after its current piece."""
        self._stopped = True

    def view(self, slot: int) -> memoryview:
        """The bytes of one block, writable.

        Raises:
            IndexError: the slot does not exist.
        """
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        start = slot * self.stride
        return self._bytes[start : start + self.block_bytes].data

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.stride

    def holds(self, address: int) -> bool:
        """Whether an address is the start of a slot."""
        return (
            0 <= address - self.address < self.num_slots * self.stride
            and (address - self.address) % self.stride == 0
        )

    def keep(self) -> None:
        """See `HostSlots.keep`. `close` does not unmap the memory either."""
        if not self.kept:
            self.kept = True
            ctypes.pythonapi.Py_IncRef(
                ctypes.py_object(self._map)
            )  # the interpreter's end must not unmap it either
            log.error(
                "arena memory stays mapped: a thread may still access it",
                bytes=self.num_slots * self.stride,
            )

    def close(self) -> None:
        """Free the memory when its last view is gone.

        The memory stays mapped if a thread touches it now.
        """
        self._closed = True
        if self._touching:
            self.keep()
        self._bytes = np.empty(0, np.uint8)
        if self.kept:
            return
        try:
            self._map.close()
        except BufferError:
            log.debug("arena still in view, memory is freed with the last view")
