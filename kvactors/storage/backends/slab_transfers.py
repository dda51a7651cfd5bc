"""Reading one slot of a slab, around the page cache where possible."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from kvactors.storage.backends.slab_memory import address_of, memory
from kvactors.storage.backends.slab_table import PAGE, Meta
from kvactors.storage.messages import Outcome


class Transfers:
    """Reads one slot a call, in the calling thread.

    Direct I/O moves whole aligned pages, so memory that is not aligned, or whose last page belongs
    to another owner, goes through a bounce buffer of the thread.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def read(
        self, fd: int, at: int, address: int, available: int, meta: Meta, *, direct: bool
    ) -> Outcome:
        """Read a slot's payload. MISS if the file is shorter than it. OSError.

        Args:
            fd: of the slab.
            at: where the slot begins in it.
            address: memory for the payload.
            available: number of bytes that may be written at `address`.
            meta: of the store.
            direct: whether the file is open for direct I/O.
        """
        size, stride = meta.block_bytes, meta.stride
        if not direct:
            return (
                Outcome.OK if os.preadv(fd, [memory(address, size)], at) == size else Outcome.MISS
            )
        if not (address % PAGE or available < stride):
            return (
                Outcome.OK if os.preadv(fd, [memory(address, stride)], at) >= size else Outcome.MISS
            )
        bounce = self.bounce_buffer(stride)
        if os.preadv(fd, [bounce], at) < size:
            return Outcome.MISS
        ctypes.memmove(address, address_of(bounce), size)
        return Outcome.OK

    def bounce_buffer(self, stride: int) -> mmap.mmap:
        """Aligned memory that belongs to the calling thread."""
        if getattr(self._thread, "buffer", None) is None:
            self._thread.buffer = mmap.mmap(-1, stride)
        found: mmap.mmap = self._thread.buffer
        return found
