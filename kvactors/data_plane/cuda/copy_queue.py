"""Copies between tensors of a GPU and host slots, for threads without an event loop.

The calling thread puts copies on a stream and asks how far they are. No thread waits for the GPU,
except one for each direction if a file descriptor is to become readable.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.base import CLOSE_LIMIT
from kvactors.data_plane.cuda.copies import Copies, HostSlotPlan, Transfer
from kvactors.data_plane.cuda.device import CudaTensors
from kvactors.data_plane.cuda.driver import FATAL, UNTIMED, CudaDriver, CudaError
from kvactors.device.base import checked_numbers
from kvactors.device.tensors import Rows
from kvactors.errors import CacheClosed, DeviceError
from kvactors.threads import Workers

BLOCKING = 1
"""CU_EVENT_BLOCKING_SYNC: a thread that waits for the event sleeps."""

FIRST_PAUSE, LAST_PAUSE = 50e-6, 1e-3
"""Seconds between two questions of `wait`: they double."""


class CudaCopyQueue:
    """Copies of a GPU's blocks in the order of their submission, one stream for each direction.
    Block b is row b of each tensor. event_fd: whether `event_fd` becomes readable when copies have
    ended. One thread at a time calls the methods. `wait` is the exception."""

    def __init__(
        self,
        rows: Sequence[Rows],
        plan: HostSlotPlan,
        *,
        driver: CudaDriver,
        event_fd: bool = False,
    ) -> None:
        self._num_slots = plan.num_slots
        self._process = os.getpid()
        self._jobs: dict[int, tuple[Transfer, int]] = {}  # with the number of pairs
        self._last = 0
        self._undo = ExitStack()
        self._watchers: dict[bool, Workers] = {}
        self._queues: dict[bool, deque[int]] = {True: deque(), False: deque()}
        self.event_fd = -1
        self._device = CudaTensors(rows, driver)
        self._undo.callback(self._device.close)
        flags = UNTIMED | BLOCKING if event_fd else UNTIMED
        with self._device.current():
            try:
                self._copies = Copies(self._device, plan, self._undo, event_flags=flags)
                self._ordering = driver.make(self._undo, "cuEventCreate", UNTIMED)
            except BaseException:
                self._undo.close()
                raise
        if event_fd:
            self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._watchers = {
                to_device: Workers(1, f"kvactors-cuda-{'load' if to_device else 'store'}-watch")
                for to_device in (True, False)
            }

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
        if self._watchers:
            self._watchers[job.to_device].submit(partial(self._watch, job))
        return self._last

    # -- progress

    def _watch(self, job: Transfer) -> None:
        """In a thread: make the descriptor readable when a copy has ended."""
        driver, pause = self._device.driver, FIRST_PAUSE
        with ExitStack() as entered:
            if not driver.status("cuCtxPushCurrent", self._device.context):
                # The call reports an error of the copies too, which `ask` finds.
                entered.callback(driver.status, "cuCtxPopCurrent", None)
                if job.recorded:
                    driver.status("cuEventSynchronize", job.events[0])
            while not self._copies.ask(job):
                time.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)
        os.eventfd_write(self.event_fd, 1)

    def _has_ended(self, job: Transfer) -> bool:
        """A watcher reads the event until it has ended the job, so nothing else ends it."""
        return job.ended if self._watchers else self._copies.ask(job)

    def take_ended(self) -> list[tuple[int, int, float, str]]:
        """Number, bytes, seconds and error of the copies that have ended and were not returned
        before."""
        found = []
        for to_device, numbers in self._queues.items():
            while numbers and self._has_ended(self._jobs[numbers[0]][0]):
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
        while not self._has_ended(job):
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
            self._close_fd()
            return True
        until = time.monotonic() + CLOSE_LIMIT
        jobs = list(self._jobs)
        ended = all(self.wait(number, until - time.monotonic()) for number in jobs)
        for workers in self._watchers.values():
            workers.close()
            while workers.busy and time.monotonic() < until:
                time.sleep(FIRST_PAUSE)
            ended &= not workers.busy
        if ended:
            self.take_ended()  # the memory of those that were never asked for
            with ExitStack() as entered:
                if not self._device.driver.status("cuCtxPushCurrent", self._device.context):
                    entered.callback(self._device.driver.status, "cuCtxPopCurrent", None)
                self._undo.close()
            self._close_fd()
        else:
            self._device.abandon(self._undo.pop_all(), self._copies)
        return ended

    def _close_fd(self) -> None:
        number, self.event_fd = self.event_fd, -1
        if number >= 0:
            os.close(number)
