"""Copies between an engine's device blocks and host slots, without an event loop."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.device.tensors import Rows, address_of, rows_of
from kvactors.errors import CacheClosed, DeviceError, LayoutError
from kvactors.native import CopyQueue
from kvactors.tier_cache.slot_memory import SlotMemory

INLINE_BYTES = 256 << 10
"""A copy of so many bytes takes less time than its hand-off to a thread."""


class CopyResult(NamedTuple):
    """A copy that has ended.

    Attributes:
        job: the name that the caller gave it.
        stored: whether it was a store (device to host) or a load.
        nbytes: bytes copied.
        seconds: from the submission to the end.
    """

    job: Hashable
    stored: bool
    nbytes: int
    seconds: float


class CopyWorker:
    """Copies device blocks to host slots and back in native threads.

    A block's bytes in a slot are those of its rows in every tensor, one after another. Threads
    start with the first copy that is worth one, so a worker can be made before a fork. Calls come
    from any thread, one at a time (`wait` excepted).

    Args:
        tensors: the engine's tensors in host memory (numpy, torch, paddle and others that support
            DLPack). Block b is row b of each: first axis, of the same length in all.
        memory: the host slots.
        offset: bytes from the start of a slot's row to this worker's share, for several ranks that
            share rows.
        blocks_per_slot: device blocks in a slot. Slots of `submit_store` and `submit_load` are then
            counted in device blocks: slot * blocks_per_slot + index.
        threads: copying threads, 1 to 64.
        inline_bytes: smaller copies are made by the thread that submits them.
        event_fd: whether `fd` becomes readable when copies have ended.

    Raises:
        DeviceError: a tensor is not in host memory, or has gaps inside its rows. CUDA tensors need
            a worker of the engine.
        LayoutError: the tensors have different numbers of rows, or a block does not fit.
    """

    def __init__(
        self,
        tensors: Sequence[Any],
        memory: SlotMemory,
        *,
        offset: int = 0,
        blocks_per_slot: int = 1,
        threads: int = 2,
        inline_bytes: int = INLINE_BYTES,
        event_fd: bool = False,
    ) -> None:
        rows = [rows_of(tensor) for tensor in tensors]
        self.block_bytes = _block_bytes(rows)
        share = self.block_bytes * blocks_per_slot
        if offset < 0 or blocks_per_slot < 1 or offset + share > memory.block_bytes:
            raise LayoutError(
                f"{blocks_per_slot} blocks of {self.block_bytes} bytes at {offset} do not fit in a "
                f"slot of {memory.block_bytes} bytes"
            )
        self.num_blocks = rows[0].rows
        self._tensors = list(tensors)
        self._addresses = [one.address for one in rows]
        self._memory = memory
        self._queue: CopyQueue | None = CopyQueue(
            _ints([one.address for one in rows]),
            _ints([one.nbytes for one in rows]),
            _ints([one.stride for one in rows]),
            self.num_blocks,
            memory.address + offset,
            memory.stride,
            blocks_per_slot,
            memory.num_slots * blocks_per_slot,
            threads,
            inline_bytes,
            event_fd,
        )
        self._names: dict[int, tuple[Hashable, bool]] = {}
        self._numbers: dict[Hashable, int] = {}

    @property
    def fd(self) -> int | None:
        """File descriptor for `select`, None without `event_fd`. Read its 8 bytes before
        `get_finished`."""
        found = -1 if self._queue is None else self._queue.event_fd
        return None if found < 0 else found

    def submit_store(self, job: Hashable, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy device blocks to host slots.

        Args:
            job: a name for the result, not that of another copy in flight.
            blocks: device blocks.
            slots: as many host slots.

        Raises:
            ValueError: a number is out of range, the lengths differ, or the name is in use.
                Nothing is copied.
            DeviceError: a tensor has moved since the worker was made. Nothing is copied.
            CacheClosed: the worker is shut down, or was used before a fork.
        """
        self._submit(job, True, blocks, slots)

    def submit_load(self, job: Hashable, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy host slots to device blocks. See `submit_store`."""
        self._submit(job, False, blocks, slots)

    def _submit(
        self, job: Hashable, stored: bool, blocks: Sequence[int], slots: Sequence[int]
    ) -> None:
        if self._queue is None:
            raise CacheClosed("the copy worker is shut down")
        if job in self._numbers:
            raise ValueError(f"job {job!r} is in flight")
        for tensor, address in zip(self._tensors, self._addresses, strict=True):
            if address_of(tensor) != address:
                raise DeviceError("a tensor has moved since the copy worker was made")
        try:
            number = self._queue.submit(stored, _ints(blocks), _ints(slots))
        except RuntimeError as error:
            raise CacheClosed(str(error)) from error
        self._names[number] = (job, stored)
        self._numbers[job] = number

    def get_finished(self) -> list[CopyResult]:
        """The copies that have ended since the last call, in the order of their ends."""
        if self._queue is None:
            return []
        found = []
        for number, nbytes, seconds in self._queue.take_ended():
            job, stored = self._names.pop(number)
            del self._numbers[job]
            found.append(CopyResult(job, stored, nbytes, seconds))
        return found

    def wait(self, jobs: Iterable[Hashable], limit: float = 60.0) -> bool:
        """Wait for copies, at most `limit` seconds in all. `get_finished` returns them afterwards.

        Returns:
            Whether all of them have ended. Names that are not in flight have.
        """
        until = monotonic() + limit
        numbers = [self._numbers[job] for job in jobs if job in self._numbers]
        queue = self._queue
        return queue is None or all(queue.wait(one, until - monotonic()) for one in numbers)

    @property
    def in_flight(self) -> int:
        """Copies that `get_finished` has not returned."""
        return 0 if self._queue is None else self._queue.in_flight

    def shutdown(self) -> None:
        """Let the copies end and release tensors and memory, any number of times."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()
        self._tensors = []


def _block_bytes(rows: Sequence[Rows]) -> int:
    if not rows:
        raise LayoutError("a copy worker needs at least 1 tensor")
    if not all(one.host for one in rows):
        raise DeviceError(
            "a tensor is not in host memory: this worker copies in the CPU's memory only, use the "
            "engine's worker for a GPU"
        )
    if len({one.rows for one in rows}) > 1:
        raise LayoutError(f"tensors of different lengths: {sorted({one.rows for one in rows})}")
    if not all(one.nbytes for one in rows):
        raise LayoutError("a tensor has empty rows")
    return sum(one.nbytes for one in rows)


def _ints(numbers: Sequence[int]) -> NDArray[np.int64]:
    found = np.asarray(numbers)
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"block and slot numbers must be integers, not {found.dtype}")
    return np.ascontiguousarray(found, np.int64)
