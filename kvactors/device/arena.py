"""The host arena: one slot per block, page aligned, touched once at start."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import platform
import sys
import time
from _thread import get_ident
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.errors import ConfigError, DeviceError
from kvactors.native import touch
from kvactors.threads import Workers, atexit_close

# -- Binding of memory to a NUMA node, by the system calls of Linux (mbind(2), set_mempolicy(2),
# get_mempolicy(2)).


CALLS = {"x86_64": (237, 239, 238), "aarch64": (235, 236, 237)}
"""Numbers of mbind, get_mempolicy and set_mempolicy, by machine."""

BIND = 2  # MPOL_BIND: pages are taken from the given nodes only

MAX_NODES = 1024
WORD = 8 * ctypes.sizeof(ctypes.c_ulong)
Mask = ctypes.c_ulong * (MAX_NODES // WORD)


def bind(address: int, size: int, node: int, setting: str = "host.numa_node") -> None:
    """Let the pages of a range, none of which was touched yet, come from one node.

    Args:
        address: of the range, page aligned.
    """
    where = (ctypes.c_void_p(address), ctypes.c_ulong(size))
    policy = (ctypes.c_int(BIND), _mask(node), ctypes.c_ulong(MAX_NODES))
    error = _call(0, *where, *policy, ctypes.c_uint(0))
    if error:
        raise ConfigError(
            f"{setting} is {node}, and the host memory cannot be bound to it: {error}"
        )


@contextmanager
def pages_from(node: int | None, setting: str) -> Iterator[None]:
    """Let the pages that this thread touches first, in other code, come from one node.

    Args:
        node: number of the node, None for the system's choice.
    """
    if node is None:
        yield
        return
    mode, mask = ctypes.c_int(-1), Mask()
    nowhere = (ctypes.c_void_p(), ctypes.c_ulong())
    error = _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(MAX_NODES), *nowhere)
    error = error or _set_policy(BIND, _mask(node))
    if error:
        raise ConfigError(f"{setting} is {node}, and host memory cannot come from it: {error}")
    try:
        yield
    finally:
        _set_policy(mode.value, mask)


def _set_policy(mode: int, mask: ctypes.Array[ctypes.c_ulong]) -> str:
    return _call(2, ctypes.c_int(mode), mask, ctypes.c_ulong(MAX_NODES))


def _mask(node: int) -> ctypes.Array[ctypes.c_ulong]:
    mask = Mask()
    mask[node // WORD] |= 1 << node % WORD
    return mask


def _call(which: int, *arguments: object) -> str:
    """Make a system call. Returns the error, empty if there was none."""
    numbers = CALLS.get(platform.machine())
    if numbers is None or sys.platform != "linux":
        return f"it is not supported on {sys.platform} {platform.machine()}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(numbers[which]), *arguments) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


# -- Fresh memory, brought in by several threads before it is used.


PIECE = 64 << 20  # bytes touched between two checks for a stop
MOST_THREADS = 16  # threads at most: the system clears pages no faster with more


class FreshMemory:
    """Ranges of memory in pieces, each of which one thread touches."""

    def __init__(
        self, ranges: Iterable[tuple[int, int]], touch: Callable[[int, int], object]
    ) -> None:
        self.stopped = False
        self._touch = touch
        self._threads: set[int] = set()
        self._left = deque(
            (address + start, min(PIECE, size - start))
            for address, size in ranges
            for start in range(0, size, PIECE)
        )

    @property
    def busy(self) -> bool:
        return bool(self._threads)

    def stop_touching(self) -> None:
        self.stopped = True

    def touch(self) -> None:
        """Touch pieces until none is left. Each call takes those that no other has taken."""
        thread = get_ident()
        self._threads.add(thread)  # before the check: the memory may be freed once no thread is in
        try:
            while self._left and not self.stopped:
                try:
                    piece = self._left.popleft()
                except IndexError:  # another thread took the last one
                    return
                self._touch(*piece)
        finally:
            self._threads.discard(thread)


async def bring_in(fresh: FreshMemory | None, *, inline: bool) -> None:
    """Fault in every page of memory, None for memory of a caller, in threads of low priority, one
    for each core. It takes about a second a gigabyte. A cancellation ends this after the current
    pieces. inline: in the loop's thread, for loops of virtual time."""
    if fresh is None:
        return
    if inline:
        fresh.touch()
        return
    count = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    workers = Workers(count, "kvactors-touch")
    calls = [asyncio.wrap_future(workers.submit(fresh.touch)) for _ in range(count)]
    workers.close()
    await wait_uncancelled(asyncio.gather(*calls), fresh.stop_touching)


PAGE = 4096

HUGE = 2 << 20  # bytes of a huge page, the first of which the slots begin in

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


class HostSlots:
    """Host slots by number, in the memory of this process or of others.

    Attributes:
        in_use: slots that jobs of failed actors still access (a call to a store that does not
            return), with the number of such jobs. Such slots are not handed out.
        kept: whether the memory must stay mapped after `close`.
        trouble: why the memory is not as the settings ask for, empty if it is.
        small_pages: why this process's memory has pages of 4 KiB, empty if it has huge ones.
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
        trailer: bytes right after each block that a store may use for the block's metadata.

    Raises:
        DeviceError: the system does not give so much memory.
    """

    fresh: FreshMemory

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
        mapped = size + (HUGE if size >= HUGE else 0)
        try:  # private: shared memory gets huge pages from a setting that is off by default
            self._map = mmap.mmap(-1, mapped, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise DeviceError(
                f"{mapped} bytes of memory for {num_slots} host slots: {error}"
            ) from error
        whole = np.frombuffer(self._map, np.uint8)
        start = -int(whole.ctypes.data) % HUGE if size >= HUGE else 0
        self._bytes = whole[start : start + size]
        self.address = int(self._bytes.ctypes.data)
        self._view = self._bytes.data  # a slice of it costs less than one of the array
        if numa_node is not None:
            bind(self.address, size, numa_node)
        self.small_pages = self._ask_for_huge_pages(start, size)
        self.fresh = self._all_fresh()
        atexit_close(self)

    def _all_fresh(self) -> FreshMemory:
        return FreshMemory([(self.address, self.nbytes)], self._touch)

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
        self.fresh.stopped = True
        while self.fresh.busy and time.monotonic() < until:
            time.sleep(0.001)

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
        """Return the memory of every slot to the system. `touch` brings zeros in again."""
        if self._locked:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.munlock(ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes))
            self._locked = False
        self._map.madvise(mmap.MADV_DONTNEED)
        self.fresh = self._all_fresh()

    def view(self, slot: int) -> memoryview:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        start = slot * self.stride
        return self._view[start : start + self.block_bytes]

    @property
    def nbytes(self) -> int:
        return self.num_slots * self.stride

    def holds(self, address: int) -> bool:
        offset = address - self.address
        return 0 <= offset < self.nbytes and offset % self.stride == 0

    def keep(self) -> None:
        if not self.kept:
            self.kept = True
            # The interpreter's end must not unmap it either.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._map))
            log.error("arena memory stays mapped: a thread may still access it", bytes=self.nbytes)

    def close(self) -> None:
        """Free the memory with its last view. It stays mapped if a thread touches it now."""
        self.fresh.stopped = True
        if self.fresh.busy:
            self.keep()
        self._bytes = np.empty(0, np.uint8)
        self._view = self._bytes.data
        if self.kept:
            return
        try:
            self._map.close()
        except BufferError:
            log.debug("arena still in view, memory is freed with the last view")
