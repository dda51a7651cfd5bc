"""The host arena: one slot per block, page aligned, touched once at start."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import structlog

from kvactors.native import touch

PAGE = 4096

log = structlog.get_logger()


class Arena:
    """num_slots slots of `stride` bytes (block_bytes and the trailer rounded up to whole pages), one after another from `address`.

    trailer: bytes right behind each block that a store may use for what it keeps beside a block.

    pinned: lock the pages in memory; `locked` tells whether the system allowed it. Views must be dropped before `close`.
    """

    def __init__(self, num_slots: int, block_bytes: int, *, pinned: bool = False, trailer: int = 0) -> None:
        self.num_slots = num_slots
        self.block_bytes = block_bytes
        self.trailer = trailer
        self.stride = -(-(block_bytes + trailer) // PAGE) * PAGE
        self.pinned = pinned
        self.locked = False
        self._map = mmap.mmap(-1, max(1, num_slots) * self.stride)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self._bytes.ctypes.data)

    def touch(self) -> None:
        """Bring every page in, and lock it if asked to. Blocks for about a second a gigabyte; call it off the loop."""
        size = self.num_slots * self.stride
        touch(self.address, size)
        if self.pinned and size:
            libc = ctypes.CDLL(None, use_errno=True)
            self.locked = libc.mlock(ctypes.c_void_p(self.address), ctypes.c_size_t(size)) == 0
            if not self.locked:
                log.warning("the arena could not be pinned", bytes=size, errno=ctypes.get_errno())

    def view(self, slot: int) -> memoryview:
        """The bytes of one block, writable. IndexError if there is no such slot."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        start = slot * self.stride
        return self._bytes[start : start + self.block_bytes].data

    def holds(self, address: int) -> bool:
        """Whether an address is a slot's first."""
        return 0 <= address - self.address < self.num_slots * self.stride and (address - self.address) % self.stride == 0

    def close(self) -> None:
        """Let the memory go as soon as the last view has."""
        self._bytes = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            log.debug("arena still in view; its memory goes with the last view")
