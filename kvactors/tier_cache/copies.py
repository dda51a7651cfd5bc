"""Copies between an engine's device blocks and host slots, without an event loop."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.checks import check_int
from kvactors.device.tensors import Rows, address_of, rows_of
from kvactors.errors import CacheClosed, DeviceError, LayoutError
from kvactors.native import CopyQueue
from kvactors.tier_cache.checks import checked_limit
from kvactors.tier_cache.slots import SlotMemory

if TYPE_CHECKING:
    from kvactors.data_plane.cuda.copy_queue import CudaCopyQueue
    from kvactors.data_plane.cuda.driver import CudaDriver

KEPT: list[object] = []
"""Tensors and host memory that copies which never ended may still use. Never freed."""

COPY_LIMIT_S = 600.0  # limit of a copy: only a hang takes as long
INLINE_BYTES = 256 << 10  # a copy of so many bytes takes less time than its hand-off to a thread


class CopyResult(NamedTuple):
    """A copy that has ended.

    Attributes:
        seconds: from the submission to the end. On a GPU, to the call that found the end.
        error: why bytes did not arrive, empty if all of them did. Only copies of a GPU fail.
    """

    job: Hashable
    stored: bool
    nbytes: int
    seconds: float
    error: str = ""


class CopyWorker:
    """Copies device blocks to host slots and back, in native threads or on streams of a GPU.

    A block's bytes in a slot are those of its rows in every tensor, one after another. Calls come
    from any thread, one at a time (`wait` excepted). On the CPU, threads start with the first copy
    that is worth one, so a worker can be made before a fork. On a GPU, the host slots are pinned
    when the worker is made.

    Args:
        tensors: the engine's tensors, all in host memory or all on one GPU (numpy, torch, paddle
            and others with DLPack, the CUDA array interface or `data_ptr()`). Block b is row b of
            each: first axis, of the same length in all.
        offset: bytes from the start of a slot's row to this worker's share, for ranks that share.
        blocks_per_slot: device blocks in a slot. Slots of `submit_store` and `submit_load` are then
            counted in device blocks: slot * blocks_per_slot + index.
        threads: copying threads on the CPU, 1 to 64.
        inline_bytes: smaller copies on the CPU are made by the thread that submits them.
        driver: of CUDA, for tensors of a GPU. None: the system's.

    Raises:
        DeviceError: a tensor is neither in host memory nor in the memory of the GPU that it names,
            has gaps inside its rows, or is not on the GPU of the other tensors. CudaError, a
            subclass: a call of the driver failed.
        LayoutError: the tensors have different numbers of rows, or a block does not fit.
        ValueError: a number is no integer, or out of range.
        CacheClosed: the memory is closed.
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
        driver: CudaDriver | None = None,
    ) -> None:
        offset = check_int("offset", offset, -(2**62))
        blocks_per_slot = check_int("blocks_per_slot", blocks_per_slot, -(2**62))
        threads = check_int("threads", threads, 1, 64)
        inline_bytes = check_int("inline_bytes", inline_bytes)
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
        self._held = memory.hold()  # copies need it until they have ended
        self._on_gpu = rows[0].gpu and not rows[0].host
        self._queue: CopyQueue | CudaCopyQueue | None
        places = memory.num_slots * blocks_per_slot
        try:
            if self._on_gpu:  # a process without a GPU imports no part of its queue
                from kvactors.data_plane.cuda.copies import HostSlotPlan
                from kvactors.data_plane.cuda.copy_queue import CudaCopyQueue
                from kvactors.data_plane.cuda.driver import load_driver

                sizes = (memory.nbytes, offset, memory.stride, blocks_per_slot, places)
                plan = HostSlotPlan(memory.address, *sizes)
                driver = driver or load_driver()
                self._queue = CudaCopyQueue(rows, plan, driver=driver)
            else:
                self._queue = CopyQueue(
                    _ints(self._addresses),
                    _ints([one.nbytes for one in rows]),
                    _ints([one.stride for one in rows]),
                    self.num_blocks,
                    memory.address + offset,
                    memory.stride,
                    blocks_per_slot,
                    places,
                    threads,
                    inline_bytes,
                )
        except BaseException:
            self._held.release()
            raise
        self._names: dict[int, tuple[Hashable, bool]] = {}
        self._numbers: dict[Hashable, int] = {}

    def submit_store(
        self,
        job: Hashable,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        stream: int | None = None,
        event: int | None = None,
    ) -> None:
        """Copy device blocks to host slots.

        Args:
            job: a name for the result, not that of another copy in flight.
            blocks: device blocks.
            slots: as many host slots.
            stream: handle of a stream of the GPU. The copy begins after the work that the stream
                has got so far: torch's `current_stream().cuda_stream`, or 0 for the default stream.
            event: handle of an event that the engine has recorded. The copy begins after it.

        Raises:
            ValueError: a number is out of range, the lengths differ, or the name is in use. Or
                neither a stream nor an event was given for tensors of a GPU, or one of them for
                tensors in host memory. Nothing is copied.
            DeviceError: a tensor has moved since the worker was made, or the GPU does not copy any
                more. Nothing is copied.
            CacheClosed: the worker is shut down, or was used before a fork.
        """
        self._submit(job, True, blocks, slots, stream, event)

    def submit_load(
        self,
        job: Hashable,
        blocks: Sequence[int],
        slots: Sequence[int],
        *,
        stream: int | None = None,
        event: int | None = None,
    ) -> None:
        """Copy host slots to device blocks, after the engine's work on them: see `submit_store`."""
        self._submit(job, False, blocks, slots, stream, event)

    def _submit(
        self,
        job: Hashable,
        stored: bool,
        blocks: Sequence[int],
        slots: Sequence[int],
        stream: int | None,
        event: int | None,
    ) -> None:
        queue = self._queue
        if queue is None:
            raise CacheClosed("the copy worker is shut down")
        if not isinstance(job, Hashable):
            raise ValueError(f"a job's name must be hashable, not {job!r:.80}")
        if job in self._numbers:
            raise ValueError(f"job {job!r} is in flight")
        for tensor, address in zip(self._tensors, self._addresses, strict=True):
            if address_of(tensor) != address:
                raise DeviceError("a tensor has moved since the copy worker was made")
        given = stream is not None or event is not None
        if given != self._on_gpu:
            raise ValueError(
                "a copy of tensors in host memory takes neither a stream nor an event"
                if given
                else "a copy of a GPU's tensors needs the stream or the event that it comes after"
            )
        ids, places = _ints(blocks), _ints(slots)
        try:
            if isinstance(queue, CopyQueue):
                number = queue.submit(stored, ids, places)
            else:
                number = queue.submit(stored, ids, places, stream, event)
        except RuntimeError as error:
            raise CacheClosed(str(error)) from error
        self._names[number] = (job, stored)
        self._numbers[job] = number

    def get_finished(self) -> list[CopyResult]:
        """The copies that have ended since the last call, in the order of their ends."""
        if self._queue is None:
            return []
        found = []
        for number, nbytes, seconds, *error in self._queue.take_ended():
            job, stored = self._names.pop(number)
            del self._numbers[job]
            found.append(CopyResult(job, stored, nbytes, seconds, *error))
        return found

    def wait(self, jobs: Iterable[Hashable], limit: float = 60.0) -> bool:
        """Wait for copies, at most `limit` seconds in all. `get_finished` returns them afterwards.

        Returns:
            Whether all of them have ended. Names that are not in flight have.
        """
        if isinstance(jobs, str | bytes) or not isinstance(jobs, Iterable):
            raise ValueError(f"jobs must be a collection of names, not {jobs!r:.80}")
        until = monotonic() + checked_limit("limit", limit)
        numbers = [self._numbers[job] for job in jobs if job in self._numbers]
        queue = self._queue
        return queue is None or all(queue.wait(one, until - monotonic()) for one in numbers)

    def finish(self, jobs: Iterable[Hashable]) -> None:
        """Wait for copies. DeviceError if one hangs: its blocks must not be used any more."""
        if not self.wait(jobs, COPY_LIMIT_S):
            raise DeviceError(f"a copy has not ended in {COPY_LIMIT_S} s")

    @property
    def in_flight(self) -> int:
        """Copies that `get_finished` has not returned."""
        return 0 if self._queue is None else self._queue.in_flight

    def shutdown(self) -> bool:
        """Let the copies end and release tensors and memory, any number of times.

        Returns:
            Whether all copies have ended. A GPU that has stopped may still use the host memory:
            the owner must then keep it mapped.
        """
        queue, self._queue = self._queue, None
        ended = queue is None or queue.close() is not False
        if not ended:
            KEPT.append((self._tensors, self._held))
        elif queue is not None:
            self._held.release()
        self._tensors = []
        return ended


def _block_bytes(rows: Sequence[Rows]) -> int:
    if not rows:
        raise LayoutError("a copy worker needs at least 1 tensor")
    if not all(one.host or one.gpu for one in rows):
        raise DeviceError("a tensor is neither in host memory nor on an NVIDIA GPU")
    if len({one.host for one in rows}) > 1:
        raise DeviceError("some tensors are in host memory and some on a GPU")
    if len({one.rows for one in rows}) > 1:
        raise LayoutError(f"tensors of different lengths: {sorted({one.rows for one in rows})}")
    if not all(one.nbytes for one in rows):
        raise LayoutError("a tensor has empty rows")
    return sum(one.nbytes for one in rows)


def _ints(numbers: Sequence[int]) -> NDArray[np.int64]:
    try:
        found = np.asarray(numbers)
    except ValueError:  # lists of different lengths
        found = np.empty((0, 0))
    if found.ndim != 1:
        raise ValueError("block and slot numbers must be one list of integers each")
    if found.size and found.dtype.kind not in "iu":
        raise ValueError(f"block and slot numbers must be integers, not {found.dtype}")
    return np.ascontiguousarray(found, np.int64)
