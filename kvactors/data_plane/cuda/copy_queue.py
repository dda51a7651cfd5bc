"""Copies between tensors of a GPU and host slots, for threads without an event loop.

The calling thread puts copies on a stream of this queue and asks the driver's events how far they
are. No thread waits for the GPU, except one for each direction if a file descriptor is to become
readable.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.data_plane.base import CLOSE_LIMIT
from kvactors.data_plane.cuda.copies import Copies, GpuStream, Transfer, calibrate
from kvactors.data_plane.cuda.device import CudaTensors
from kvactors.data_plane.cuda.driver import FATAL, NOT_READY, UNTIMED, CudaDriver, CudaError
from kvactors.data_plane.cuda.host_pin import STAGING_BYTES, HostPin
from kvactors.device.base import checked_numbers
from kvactors.device.tensors import Rows
from kvactors.errors import CacheClosed, DeviceError
from kvactors.threads import Workers

BLOCKING = 1
"""CU_EVENT_BLOCKING_SYNC: a thread that waits for the event sleeps."""

FIRST_PAUSE, LAST_PAUSE = 50e-6, 1e-3
"""Seconds between two questions of `wait`: they double."""

log = get_logger()


class HostSlotPlan(NamedTuple):
    """Where the blocks of a worker are in host memory: rows of `slots_per_row` blocks, `row_stride`
    bytes apart, in each of which the worker's share begins at byte `offset`."""

    address: int
    nbytes: int
    offset: int
    row_stride: int
    slots_per_row: int
    num_slots: int

    def places(self, slots: NDArray[np.int64], block_bytes: int) -> NDArray[np.int64]:
        """Bytes from the start of the worker's share to each slot."""
        rows, inside = slots // self.slots_per_row, slots % self.slots_per_row
        return rows * self.row_stride + inside * block_bytes

    def step(self, block_bytes: int) -> int:
        """Bytes from a slot to its neighbour."""
        return block_bytes if self.slots_per_row > 1 else self.row_stride


@dataclass(eq=False)
class CudaJob(Transfer):
    """A copy in flight. recorded: whether the event is on the stream. error: why bytes did not
    arrive, empty if they did. ended: whether no part of it runs any more."""

    number: int
    to_host: bool
    pairs: int
    began: float = field(default_factory=time.monotonic)
    seconds: float = 0.0
    recorded: bool = False
    ended: bool = False
    error: str = ""
    code: int = 0  # of the driver, when it was last asked


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
        self._plan = plan
        self._process = os.getpid()
        self._jobs: dict[int, CudaJob] = {}
        self._last = 0
        self._broken = ""
        self._undo = ExitStack()
        self._watchers: dict[bool, Workers] = {}
        self._queues: dict[bool, deque[CudaJob]] = {True: deque(), False: deque()}
        self.event_fd = -1
        self._device = CudaTensors(rows, driver)
        self._undo.callback(self._device.close)
        self.block_bytes = int(self._device.piece_bytes.sum())
        with self._device.current():
            try:
                self._open(UNTIMED | BLOCKING if event_fd else UNTIMED)
            except BaseException:
                self._undo.close()
                raise
        if event_fd:
            self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._watchers = {
                way: Workers(1, f"kvactors-cuda-{'store' if way else 'load'}-watch")
                for way in (True, False)
            }

    def _open(self, flags: int) -> None:
        plan, device, undo = self._plan, self._device, self._undo
        pin = HostPin(device, plan.address, plan.nbytes)
        undo.callback(pin.release)
        # slots are counted in bytes, so that one may begin anywhere in a row
        slots = plan.address + plan.offset, 1, pin.on_device + plan.offset
        step = plan.step(self.block_bytes)
        self._copies = Copies(
            device, *slots, step, undo, staging_bytes=STAGING_BYTES, event_flags=flags
        )
        self._streams = self._copies.streams
        self._ordering = device.driver.make(undo, "cuEventCreate", UNTIMED)
        gpu = self._streams[True]
        self._copies.split(calibrate(self._copies, gpu).choice, gpu.stream)

    # -- submission

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
        blocks, slots = checked_numbers(
            block=(blocks, self._device.num_blocks), slot=(slots, self._plan.num_slots)
        )
        if self._broken:
            raise DeviceError(f"no more copies of this GPU's memory: {self._broken}")
        job = CudaJob(self._last + 1, to_host, len(blocks))
        gpu = self._streams[not to_host]
        try:
            with self._device.current():
                try:
                    self._copies.prepare(job, len(blocks), 1, gpu)
                    self._order(gpu, stream, event)
                    self._put(job, blocks, slots)
                except BaseException:
                    if not job.error:  # nothing was begun
                        gpu.give_back(job)
                    raise
        except CudaError as error:
            if error.code in FATAL:
                self._break(error)
            if not job.error:
                raise
        self._last = job.number
        self._jobs[job.number] = job
        self._queues[to_host].append(job)
        if self._watchers:
            self._watchers[to_host].submit(partial(self._watch, job))
        return job.number

    def _order(self, gpu: GpuStream, stream: int | None, event: int | None) -> None:
        """Let the stream wait for the engine's work."""
        driver = self._device.driver
        if stream is not None:
            driver.call("cuEventRecord", self._ordering, stream)
            gpu.wait_for(self._ordering)
        if event is not None:
            gpu.wait_for(event)

    def _put(self, job: CudaJob, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        places = self._plan.places(slots, self.block_bytes)
        pieces = range(len(self._device.piece_bytes))
        try:
            self._copies.put(job, blocks, places, [pieces], self._streams[not job.to_host])
            job.recorded = True
        except CudaError as error:
            job.error = str(error)
            self._break(error)
            raise

    def _break(self, error: CudaError) -> None:
        """Copy nothing more. Copies in flight end."""
        if not self._broken:
            self._broken = str(error)
            log.error(
                "no more copies of this GPU's memory", gpu=self._device.name, error=str(error)
            )

    # -- progress

    def _ask(self, job: CudaJob) -> bool:
        """Ask the driver whether a copy has ended. Any thread."""
        if not job.ended:
            driver = self._device.driver
            function, code = "cuCtxPushCurrent", 0
            try:
                with self._device.current():
                    function, code = self._query(job)
            except CudaError as error:
                function, code = error.function, error.code
            if code not in (0, NOT_READY):
                fault = driver.error(function, code)
                job.error = job.error or str(fault)
                self._break(fault)
            # a code that persists is that of a context which runs nothing any more
            if code == 0 or (code in FATAL and code == job.code):
                job.seconds = time.monotonic() - job.began
                job.ended = True
            job.code = code
        return job.ended

    def _query(self, job: CudaJob) -> tuple[str, int]:
        driver = self._device.driver
        if not job.recorded:  # copies that were begun before an error end before this event
            try:
                self._streams[not job.to_host].record(job.events[0], whole=True)
            except CudaError as error:
                return error.function, error.code
            job.recorded = True
        return "cuEventQuery", driver.status("cuEventQuery", job.events[0])

    def _watch(self, job: CudaJob) -> None:
        """In a thread: make the descriptor readable when a copy has ended."""
        driver, pause = self._device.driver, FIRST_PAUSE
        with ExitStack() as entered:
            if not driver.status("cuCtxPushCurrent", self._device.context):
                # The call reports an error of the copies too, which `_ask` finds.
                entered.callback(driver.status, "cuCtxPopCurrent", None)
                if job.recorded:
                    driver.status("cuEventSynchronize", job.events[0])
            while not self._ask(job):
                time.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE)
        os.eventfd_write(self.event_fd, 1)

    def _has_ended(self, job: CudaJob) -> bool:
        """A watcher reads the event until it has ended the job, so nothing else ends it."""
        return job.ended if self._watchers else self._ask(job)

    def take_ended(self) -> list[tuple[int, int, float, str]]:
        """Number, bytes, seconds and error of the copies that have ended and were not returned
        before."""
        found: list[CudaJob] = []
        for to_host, jobs in self._queues.items():
            while jobs and self._has_ended(jobs[0]):
                job = jobs.popleft()
                self._streams[not to_host].give_back(job)
                del self._jobs[job.number]
                found.append(job)
        return [
            (job.number, 0 if job.error else job.pairs * self.block_bytes, job.seconds, job.error)
            for job in found
        ]

    def wait(self, number: int, seconds: float) -> bool:
        """Whether a copy has ended, after `seconds` at most. One that was returned has."""
        job = self._jobs.get(number)
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
            ended &= not _still_busy(workers, until)
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


def _still_busy(workers: Workers, until: float) -> bool:
    while workers.busy and time.monotonic() < until:
        time.sleep(FIRST_PAUSE)
    return bool(workers.busy)
