"""Memory of host slots: new memory, memory of an engine, or a file that several processes map."""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvactors.errors import CacheClosed, ConfigError, LayoutError

PAGE = 4096

KEPT: list[memoryview] = []  # memory that threads may access until the process ends


class SlotMemory:
    """Rows of host memory, one slot each.

    A slot has `block_bytes` bytes from the start of its row. Rows are `stride` bytes apart.

    Args:
        buffer: writable, contiguous memory of `num_slots` rows. None: new memory of this process.
        stride: bytes from one row to the next. None: `block_bytes` in given memory, else
            `block_bytes` rounded up to whole pages.
        numa_node: the NUMA node that the pages come from, None for the system's choice. Pages of
            given memory that were touched before stay where they are.

    Attributes:
        trailer: bytes behind each slot that a store may use.
        given: whether the memory belongs to the caller.

    Raises:
        LayoutError: the memory is read-only, not contiguous or smaller than the rows.
        ConfigError: the memory cannot be bound to this node.
    """

    def __init__(
        self,
        num_slots: int,
        block_bytes: int,
        buffer: Any = None,
        stride: int | None = None,
        *,
        numa_node: int | None = None,
    ) -> None:
        num_slots = self.num_slots = _count("num_slots", num_slots)
        block_bytes = self.block_bytes = _count("block_bytes", block_bytes)
        stride = None if stride is None else _count("stride", stride)
        self.given = buffer is not None
        self._closed = False
        pages = -(-block_bytes // PAGE) * PAGE
        self.stride = (block_bytes if self.given else pages) if stride is None else stride
        if self.stride < block_bytes:
            raise LayoutError(f"rows of {self.stride} bytes hold no block of {block_bytes} bytes")
        size = num_slots * self.stride
        self._view = _flat(new_memory(size) if buffer is None else buffer)
        needed = size - self.stride + block_bytes
        if self._view.nbytes < needed:
            raise LayoutError(
                f"the memory has {self._view.nbytes} bytes, and {num_slots} rows of "
                f"{self.stride} bytes need {needed}"
            )
        self.trailer = 0 if self.given else self.stride - block_bytes
        self.nbytes = needed if self.given else size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))
        if numa_node is not None:
            self._bind(numa_node)

    def _bind(self, node: int) -> None:
        from kvactors.device.arena import bind  # imports numpy

        if self.address % PAGE:
            raise ConfigError(
                f"numa_node is {node}, and the given memory does not begin at a page of {PAGE} "
                "bytes"
            )
        bind(self.address, self.nbytes, node, "numa_node")

    def view(self, slot: int) -> memoryview:
        if self._closed:
            raise CacheClosed("the memory of the host slots is closed")
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        start = slot * self.stride
        return self._view[start : start + self.block_bytes]

    def holds(self, address: int) -> bool:
        offset = address - self.address
        return 0 <= offset < self.num_slots * self.stride and offset % self.stride == 0

    def hold(self) -> memoryview:
        """All rows. They stay mapped until the view is released, also after `close`."""
        if self._closed:
            raise CacheClosed("the memory of the host slots is closed")
        return self._view[:]

    def keep(self) -> None:
        """Leave the memory mapped until the process ends, because a thread may still access it."""
        KEPT.append(self._view)

    def close(self) -> None:
        """Let go of the memory. New memory is freed with its last view."""
        self._closed = True
        view, self._view = self._view, memoryview(b"")
        if not any(kept is view for kept in KEPT):
            with suppress(BufferError):  # a caller still has a view
                view.release()


def _count(name: str, value: Any) -> int:
    """A Python or numpy integer from 1 to the greatest size of a mapping, as int."""
    try:
        found = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        found = 0
    if not 1 <= found < 1 << 63:
        raise LayoutError(f"{name} must be a whole number from 1 to 2**63 - 1, not {value!r:.80}")
    return found


def new_memory(size: int) -> mmap.mmap:
    """Memory of this process. A forked child gets a copy."""
    try:
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise LayoutError(f"{size} bytes of memory for host slots: {error}") from error


def _flat(buffer: Any) -> memoryview:
    try:
        view = memoryview(buffer)
        if not view.contiguous or view.readonly:
            raise LayoutError("the memory of host slots must be writable and contiguous")
        return view.cast("B")
    except TypeError as error:
        raise LayoutError(
            f"{type(buffer).__name__} is no memory for host slots: {error}"
        ) from error


def shared_memory(path: str | Path, size: int, *, create: bool) -> mmap.mmap:
    """Map a file (in /dev/shm, for instance) that several processes share.

    Args:
        create: make the file, of mode 0600. Otherwise it must have at least `size` bytes.

    Raises:
        OSError: the file cannot be made or opened.
        LayoutError: the file is smaller than `size`, or `size` is no number of bytes.
    """
    size = _count("size", size)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(path, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
    try:
        if create:
            os.posix_fallocate(fd, 0, size)
        elif os.fstat(fd).st_size < size:
            raise LayoutError(f"{path} has {os.fstat(fd).st_size} bytes, not {size}")
        return mmap.mmap(fd, size)
    except BaseException:
        if create:
            Path(path).unlink()
        raise
    finally:
        os.close(fd)
