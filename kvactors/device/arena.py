"""The host arena: one slot per block, page aligned, touched once at start."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from kvactors.actor.log import get_logger
from kvactors.device.fresh import FreshMemory
from kvactors.device.numa import bind
from kvactors.errors import DeviceError
from kvactors.native import touch
from kvactors.threads import end_at_exit

PAGE = 4096

HUGE = 2 << 20
"""Bytes of a huge page, the first of which the slots begin in."""

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

log = get_logger()


def huge_pages_off() -> str:
    """Why this system gives no huge pages to memory that asks for them, empty if it does."""
    try:
        chosen = HUGE_PAGES.read_text("ascii")
    except (OSError, UnicodeDecodeError) as error:
        return f"{HUGE_PAGES} cannot be read: {error}"
    return f"{HUGE_PAGES} is 'never'" if "[never]" in chosen else ""


def slot_stride(block_bytes: int, trailer: int) -> int:
    """Bytes that a slot takes: a block and its trailer, in whole pages."""
    return -(-(block_bytes + trailer) // PAGE) * PAGE


def _new_map(size: int, num_slots: int) -> mmap.mmap:
    # Private: shared memory gets huge pages from a setting that is off by default.
    try:
        return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise DeviceError(f"{size} bytes of memory for {num_slots} host slots: {error}") from error


class HostSlots:
    """Host slots by number, in the memory of this process or of others.

    Attributes:
        num_slots: number of slots in each process.
        block_bytes: bytes of one process's share of a block.
        in_use: slots that jobs of failed actors still access (a call to a store that does not
            return), with the number of such jobs. Such slots are not handed out.
        kept: whether the memory must stay mapped after `close`.
        trouble: why the memory is not as the settings ask for, empty if it is.
        small_pages: why the memory has pages of 4 KiB, empty if it has huge ones, or belongs to
            other processes.
    """

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.trouble = ""
        self.small_pages = ""
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
    rounded up to whole pages. They are in huge pages where the system gives them: `small_pages` is
    the reason if it does not, empty if it does.

    Args:
        num_slots: number of slots.
        block_bytes: bytes of a block.
        pinned: whether to lock the pages in memory.
        trailer: bytes right after each block that a store may use for the block's metadata.
        numa_node: the NUMA node that the memory comes from, None for the system's choice.

    Raises:
        ConfigError: the memory cannot be bound to this node.
        DeviceError: the system does not give so much memory.
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
        self._locked = False  # whether a piece is
        size = max(1, num_slots) * self.stride
        self._map = _new_map(size + (HUGE if size >= HUGE else 0), num_slots)
        whole = np.frombuffer(self._map, np.uint8)
        start = -int(whole.ctypes.data) % HUGE if size >= HUGE else 0
        self._bytes = whole[start : start + size]
        self.address = int(self._bytes.ctypes.data)
        self._view = self._bytes.data  # a slice of it costs less than one of the array
        if numa_node is not None:
            bind(self.address, size, numa_node)
        self.small_pages = self._ask_for_huge_pages(start, size)
        self._fresh = self._all_fresh()
        end_at_exit(self)

    def _all_fresh(self) -> FreshMemory:
        return FreshMemory([(self.address, self.num_slots * self.stride)], self._touch)

    @property
    def locked(self) -> bool:
        """Whether the slots are locked in memory."""
        return self._locked and not self.trouble

    def _ask_for_huge_pages(self, start: int, size: int) -> str:
        """Why the memory has pages of 4 KiB, empty if it gets larger ones. A device moves a run of
        memory in one piece, and takes a limited number of pieces a request."""
        if size < HUGE:
            return f"{size} bytes are less than a huge page"
        reason = huge_pages_off()
        if not reason:
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE * HUGE)
                return ""
            except OSError as error:
                reason = f"the system refuses them: {error}"
        log.info("the arena has small pages", bytes=size, reason=reason)
        return reason

    def end(self, limit: float) -> None:
        """Stop a thread that touches, at the interpreter's exit. See `threads.Ending`."""
        until = time.monotonic() + limit
        self._fresh.stopped = True
        while self._fresh.busy and time.monotonic() < until:
            time.sleep(0.001)

    def touch(self) -> None:
        """Fault in every page, and lock it if the arena is pinned. See `Fresh`.

        The call blocks for about a second a gigabyte, so it belongs in threads (`bring_in`).
        """
        self._fresh.touch()

    def stop_touching(self) -> None:
        """See `Fresh`."""
        self._fresh.stop_touching()

    def _touch(self, address: int, size: int) -> None:
        touch(address, size)
        if not self.pinned or self.trouble:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        self._locked = True
        if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)) != 0:
            number = ctypes.get_errno()
            self.trouble = (
                f"host.pinned: the system refuses to lock {self.nbytes} bytes of host memory "
                f"({os.strerror(number)}): raise the limit of locked memory (ulimit -l)"
            )
            log.warning("the arena could not be pinned", bytes=self.nbytes, errno=number)

    def give_back(self) -> None:
        """Return the memory of every slot to the system. The addresses stay: `touch` brings memory
        of zeros in again."""
        if self._locked:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.munlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes))
            self._locked = False
        self._map.madvise(mmap.MADV_DONTNEED)
        self._fresh = self._all_fresh()

    def view(self, slot: int) -> memoryview:
        """The bytes of one block, writable.

        Raises:
            IndexError: the slot does not exist.
        """
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        start = slot * self.stride
        return self._view[start : start + self.block_bytes]

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
        self._fresh.stopped = True
        if self._fresh.busy:
            self.keep()
        self._bytes = np.empty(0, np.uint8)
        self._view = self._bytes.data
        if self.kept:
            return
        try:
            self._map.close()
        except BufferError:
            log.debug("arena still in view, memory is freed with the last view")
