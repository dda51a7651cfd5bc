"""Copies between tensors of a GPU and host slots, for threads without an event loop.

The calling thread puts copies on a stream and asks how far they are. No thread waits for the GPU.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.base import CLOSE_LIMIT
from kvactors.data_plane.cuda.copies import Copies, HostSlotPlan, Transfer
from kvactors.data_plane.cuda.device import CudaTensors
from kvactors.data_plane.cuda.driver import FATAL, UNTIMED, CudaDriver, CudaError
from kvactors.device.base import checked_numbers
from kvactors.device.tensors import Rows
from kvactors.errors import CacheClosed, DeviceError

FIRST_PAUSE, LAST_PAUSE = 50e-6, 1e-3
"""Seconds between two questions of `wait`: they double."""


class CudaCopyQueue:
    """Copies of a GPU's blocks in the order of their submission, one stream for each direction.
    Block b is row b of each tensor. One thread at a time calls the methods. `wait` is the
    exception."""

    def __init__(self, rows: Sequence[Rows], plan: HostSlotPlan, *, driver: CudaDriver) -> None:
        self._num_slots = plan.num_slots
        self._process = os.getpid()
        self._jobs: dict[int, tuple[Transfer, int]] = {}  # with the number of pairs
        self._last = 0
        self._undo = ExitStack()
        self._queues: dict[bool, deque[int]] = {True: deque(), False: deque()}
        self._device = CudaTensors(rows, driver)
        self._undo.callback(self._device.close)
        with self._device.current():
            try:
                self._copies = Copies(self._device, plan, self._undo)
                self._ordering = driver.make(self._undo, "cuEventCreate", UNTIMED)
            except BaseException:
                self._undo.close()
                raise

    def submit(
        self,
        to_host: bool,
        blocks: NDArray[np.int64],
        slots: NDArray[np.int64],
        stream: int | None,
        event: int | None,
    ) -> int:
        """Begin copies after the work that the engine's `stream` (0 is the default stream) has got
        so far, and after `event` as it was last recorded. An error of the driver after the first
        copy was begun is the copy's result, since some bytes may be on their way."""
        if os.getpid() != self._process:
            raise CacheClosed(
                "the copy queue was made before a fork: make another one in the child"
            )
        device, copies = self._device, self._copies
        blocks, slots = checked_numbers(
            block=(blocks, device.num_blocks), slot=(slots, self._num_slots)
        )
        if copies.broken:
            raise DeviceError(f"no more copies of this GPU's memory: {copies.broken}")
        job = Transfer(not to_host)
        after = [] if event is None else [event]
        try:
            with device.current():
                if stream is not None:
                    device.driver.call("cuEventRecord", self._ordering, stream)
                    after.append(self._ordering)
                copies.submit(job, blocks, slots, [range(len(device.piece_bytes))], after)
        except CudaError as error:
            if error.code in FATAL:
                copies.break_off(error)
            raise
        self._last += 1
        self._jobs[self._last] = job, len(blocks)
        self._queues[job.to_device].append(self._last)
        return self._last

    # -- progress

    def take_ended(self) -> list[tuple[int, int, float, str]]:
        """Number, bytes, seconds and error of the copies that have ended and were not returned
        before."""
        found = []
        for to_device, numbers in self._queues.items():
            while numbers and self._copies.ask(self._jobs[numbers[0]][0]):
                number = numbers.popleft()
                job, pairs = self._jobs.pop(number)
                self._copies.lanes[to_device].give_back(job)
                nbytes = 0 if job.error else pairs * self._copies.block_bytes
                found.append((number, nbytes, job.seconds, job.error))
        return found

    def wait(self, number: int, seconds: float) -> bool:
        """Whether a copy has ended, after `seconds` at most. One that was returned has."""
        job, _ = self._jobs.get(number, (None, 0))
        if job is None:
            return True
        until, pause = time.monotonic() + seconds, FIRST_PAUSE
        while not self._copies.ask(job):
            if (left := until - time.monotonic()) <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, LAST_PAUSE)
        return True

    @property
    def in_flight(self) -> int:
        """Copies that `take_ended` has not returned."""
        return len(self._jobs)

    def close(self) -> bool:
        """Let the copies end and release every resource. False: copies have not ended, and the host
        memory and the tensors must be kept."""
        if os.getpid() != self._process:
            self._undo.pop_all()  # the parent's
            return True
        until = time.monotonic() + CLOSE_LIMIT
        jobs = list(self._jobs)
        ended = all(self.wait(number, until - time.monotonic()) for number in jobs)
        if ended:
            self.take_ended()  # the memory of those that were never asked for
            with ExitStack() as entered:
                if not self._device.driver.status("cuCtxPushCurrent", self._device.context):
                    entered.callback(self._device.driver.status, "cuCtxPopCurrent", None)
                self._undo.close()
        else:
            self._device.abandon(self._undo.pop_all(), self._copies)
        return ended
