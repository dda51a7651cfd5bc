"""Host slots by engine key: look-ups, stores and loads in flight, eviction. Pure state."""

from __future__ import annotations

import ctypes
import mmap
import operator
import os
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvactors.cpu_evictor.slots import HostBlock, HostTier, SlotState
from kvactors.errors import CacheClosed, ConfigError, LayoutError
from kvactors.tier_cache.answers import CopiesInFlight, Lookup, StoreSlots

MISS, PENDING, HIT = Lookup

UNKNOWN = b""  # the parent of a block whose parent is not known. Keys are never empty.


class SlotTable:
    """The host tier of one `TierCache`, used by one thread.

    A key whose copy is in flight when the table is reset keeps its slot until the copy completes,
    and cannot be stored again before. So a completion always names one slot.

    Attributes:
        keeps: whether a block that is chosen to be evicted stays. It is pinned then.
        held: keys answered HIT since the last `end_step`. They are not evicted.
        awaited: fetched keys that were not answered HIT yet, with the time up to which they are not
            evicted. Without it two requests with more blocks than slots would evict each other's
            without end.
    """

    def __init__(self, tier: HostTier) -> None:
        self.tier = tier
        self.keeps: Callable[[HostBlock], bool] = lambda _: False
        self.held: set[bytes] = set()
        self.awaited: dict[bytes, float] = {}
        self._blocks = tier.blocks
        self._named: set[bytes] = set()  # parents of the blocks, and of some that have left
        self._stores: dict[bytes, HostBlock] = {}  # copies to the host, in the order of begin
        self._loads: dict[bytes, list[HostBlock]] = {}  # the block of each load in flight

    def lookup(self, key: bytes) -> Lookup:
        """Whether a key is in a slot. A HIT is held until `end_step`."""
        block = self._blocks.get(key)
        if block is None:
            return MISS
        if block.arriving:
            return PENDING
        self.held.add(key)
        if self.awaited:
            self.awaited.pop(key, None)
        return HIT

    def end_step(self, now: float) -> None:
        self.held.clear()
        while self.awaited:
            key, until = next(iter(self.awaited.items()))
            if until > now:
                break
            del self.awaited[key]

    # -- stores

    def prepare_store(
        self,
        keys: Sequence[bytes],
        parents: Sequence[bytes | None] | None = None,
        most: int = sys.maxsize,
        stay: Sequence[bytes] = (),
    ) -> StoreSlots:
        """Take slots for the first keys that have none, as many as can be had.

        Args:
            parents: None where unknown. Keys that have a slot learn theirs too.
        """
        above = dict(zip(keys, parents, strict=True)) if parents else {}
        lacking = [key for key in dict.fromkeys(keys) if not self.is_taken(key)]
        count, evicted = self._make_room(min(most, len(lacking)), [*keys, *stay])
        wanted, lacking = lacking[:count], lacking[count:]
        for key in reversed(above):
            self._learn_parent(key, above[key])
        slots: dict[bytes, int] = {}
        for key in reversed(wanted):  # the deepest is the oldest
            parent = self._checked_parent(key, above.get(key))
            slots[key] = self.tier.add(key, parent, SlotState.RESIDENT).slot
        for key in wanted:
            self._stores[key] = self._blocks[key]
        given = tuple(slots[key] for key in wanted)
        return StoreSlots(tuple(wanted), given, tuple(evicted), tuple(lacking))

    def _learn_parent(self, key: bytes, parent: bytes | None) -> None:
        """A key that has a slot is given its parent, if that was unknown."""
        block = self._blocks.get(key)
        if block is None or block.parent != UNKNOWN or not parent:
            return
        self.tier.move(block, SlotState.TRANSIT)
        block.parent = self._checked_parent(key, parent)
        self.tier.move(block, SlotState.RESIDENT)

    def _checked_parent(self, key: bytes, parent: bytes | None) -> bytes:
        """The parent, or UNKNOWN if the key is among its ancestors: neither could be evicted."""
        if not parent or parent == key:
            return UNKNOWN
        if key in self._named:
            above = parent
            while above != key:
                block = self._blocks.get(above)
                if block is None:
                    break
                above = block.parent
            else:
                return UNKNOWN
        if len(self._named) > 2 * self.tier.capacity:
            self._named = {block.parent for block in self._blocks.values()}
        self._named.add(parent)
        return parent

    def is_taken(self, key: bytes) -> bool:
        return key in self._blocks or key in self._stores or key in self._loads

    def _make_room(self, count: int, keys: Sequence[bytes] = ()) -> tuple[int, list[bytes]]:
        """Evict blocks for lacking slots. Returns the slots to be had and the evicted keys."""
        lacking = count - self.tier.free
        if lacking <= 0:
            return count, []
        spared = self.held.union(keys, self.awaited)
        victims = [block for block in self.tier.victims(lacking, spared) if not self.keeps(block)]
        for block in victims:
            self.tier.drop(block)
        return count - lacking + len(victims), [block.hash for block in victims]

    def take_slots(self, keys: Sequence[bytes]) -> tuple[list[HostBlock], list[bytes]]:
        """Slots for the first keys whose bytes come from storage, as many as can be had, and the
        keys evicted for them."""
        count, evicted = self._make_room(len(keys))
        return [self.tier.add(key, UNKNOWN, SlotState.RESIDENT) for key in keys[:count]], evicted

    def complete_store(self, keys: Iterable[bytes], success: bool) -> list[HostBlock]:
        """Returns the blocks that can be read now, in the order in which their stores began."""
        ended = set(keys)
        self._check_in_flight(ended, self._stores, "store")
        many = len(ended) > 1
        ordered = [key for key in self._stores if key in ended] if many else list(ended)
        blocks = [self._stores.pop(key) for key in ordered]
        failed = frozenset() if success else frozenset(range(len(blocks)))
        return self.tier.land(blocks, failed)

    # -- loads

    def prepare_load(self, keys: Sequence[bytes]) -> list[int]:
        blocks: list[HostBlock] = []
        for key in keys:
            block = self.tier.readable(key)
            if block is None:
                raise ValueError(
                    f"key {key.hex()} has no readable host slot: load only keys that lookup "
                    "answered HIT in this step"
                )
            blocks.append(block)
        for key, block in zip(keys, blocks, strict=True):
            self.tier.pin(block)
            self._loads.setdefault(key, []).append(block)
        return [block.slot for block in blocks]

    def complete_load(self, keys: Iterable[bytes]) -> None:
        ended = Counter(keys)
        self._check_in_flight(ended, self._loads, "load")
        for key, ends in ended.items():
            if ends > len(self._loads[key]):
                raise ValueError(f"{ends} loads of key {key.hex()} end, and fewer are in flight")
        for key in ended.elements():
            self.tier.unpin(self._loads[key].pop())
            if not self._loads[key]:
                del self._loads[key]

    @staticmethod
    def _check_in_flight(keys: Iterable[bytes], in_flight: Container[bytes], what: str) -> None:
        unknown = [key for key in keys if key not in in_flight]
        if unknown:
            raise ValueError(f"no {what} of key {unknown[0].hex()} is in flight")

    # -- the rest

    def touch(self, keys: Sequence[bytes]) -> None:
        self.tier.touch(reversed(keys))

    def reset(self) -> list[bytes]:
        """Forget every key. Slots of copies in flight are free when those complete.

        Returns:
            The keys that could be read, children before parents as far as that is known.
        """
        leaving = [*self.tier.victims(len(self._blocks)), *self._blocks.values()]
        removed = list(dict.fromkeys(block.hash for block in leaving if not block.arriving))
        self.tier.clear()
        self.held.clear()
        self.awaited.clear()
        return removed

    def copies_in_flight(self) -> CopiesInFlight:
        loads = [key for key, blocks in self._loads.items() for _ in blocks]
        return CopiesInFlight(tuple(self._stores), tuple(loads))

    @property
    def in_flight(self) -> int:
        return len(self._stores) + len(self._loads)


# -- Memory of host slots: new memory, memory of an engine, or a file that several processes map.


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
