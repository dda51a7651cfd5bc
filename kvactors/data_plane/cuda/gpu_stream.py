"""A direction's streams on a GPU, with the events and the memory of its operations."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.context import quietly
from kvactors.data_plane.cuda.driver import (
    HIGH_PRIORITY,
    NON_BLOCKING,
    OUT_OF_MEMORY,
    UNTIMED,
    CudaDriver,
    CudaError,
)
from kvactors.data_plane.cuda.gather import LEAST, GatherBuffer
from kvactors.data_plane.cuda.scratch import Scratch

FIRST_PAIRS = 1024
"""Pairs for which scratch memory is allocated at start. A larger operation replaces it with a
larger one."""

log = get_logger()


class GpuStream:
    """The streams of copies in one direction: one for the copy engines, and one for kernels.

    With a buffer for small pieces the kernels have a separate stream of high priority, so that
    they run while the engine's kernels have all multiprocessors and the copy engine has work.
    Without one, both are the same stream. Made and closed with the GPU's context current.

    Args:
        driver: the GPU's.
        to_device: the direction.
        event_flags: of the events.
        staging_bytes: of the buffer, 0 for none. Without memory for it there is none.

    Attributes:
        stream: of the copy engines, the driver's handle.
        kernels: of the kernels.
        buffer: for small pieces, or None.

    Raises:
        CudaError: a call of the driver failed.
    """

    def __init__(
        self,
        driver: CudaDriver,
        *,
        to_device: bool,
        event_flags: int = UNTIMED,
        staging_bytes: int = 0,
    ) -> None:
        self.driver = driver
        self.to_device = to_device
        self.buffer: GatherBuffer | None = None
        self._event_flags = event_flags
        self._undo = ExitStack()
        self._events: list[int] = []
        self._scratches: list[Scratch] = []
        self._launched = self._staged = False
        try:
            self.stream = self.kernels = driver.read("cuStreamCreate", NON_BLOCKING)
            self._undo.callback(quietly, driver, "cuStreamDestroy", self.stream)
            self._scratches.append(Scratch(driver, 2 * FIRST_PAIRS))
            if staging_bytes >= 2 * LEAST:
                self._add_buffer(staging_bytes)
        except BaseException:
            self.close()
            raise

    def _add_buffer(self, nbytes: int) -> None:
        driver = self.driver
        try:
            self.buffer = GatherBuffer(driver, nbytes)
        except CudaError as error:
            if (error.function, error.code) != ("cuMemAlloc", OUT_OF_MEMORY):
                raise
            log.warning("no memory on the GPU to gather small pieces in", bytes=nbytes)
            return
        self._undo.callback(self.buffer.close)
        self.kernels = driver.read("cuStreamCreateWithPriority", NON_BLOCKING, HIGH_PRIORITY)
        self._undo.callback(quietly, driver, "cuStreamDestroy", self.kernels)
        self._joint = driver.read("cuEventCreate", UNTIMED)
        self._undo.callback(quietly, driver, "cuEventDestroy", self._joint)

    # -- order

    def _order(self, first: int, last: int) -> None:
        self.driver.call("cuEventRecord", self._joint, first)
        self.driver.call("cuStreamWaitEvent", last, self._joint, 0)

    def before_launch(self) -> None:
        """A kernel that reads or writes host slots itself comes next. CudaError."""
        if self._staged and not self.to_device:  # earlier copies may write the same slots
            self._order(self.stream, self.kernels)
            self._staged = False
        self._launched = True

    def note_staged(self) -> None:
        """Pieces went through the buffer."""
        self._staged = True
        self._launched |= self.to_device

    def record(self, event: int, *, whole: bool = False) -> None:
        """Record an event after everything that both streams have got. CudaError.

        Args:
            event: the driver's handle.
            whole: whether any part of it may be missing, after an error.
        """
        last = self.stream
        if self.kernels != self.stream and (self._launched or whole):
            # the stream that needs not wait goes on with the next layers
            first, last = self.stream, self.kernels
            if not self.to_device:
                first, last = last, first
            self._order(first, last)
            self._launched = False
        self.driver.call("cuEventRecord", event, last)

    def wait_for(self, event: int) -> None:
        """Run what comes next after an event. CudaError."""
        self.driver.call("cuStreamWaitEvent", self.stream, event, 0)
        if self.kernels != self.stream:
            self.driver.call("cuStreamWaitEvent", self.kernels, event, 0)

    def settle(self, context: int) -> bool:
        """Wait without limit until no work on the streams runs any more. Returns whether the
        context is usable."""
        return all(
            self.driver.settle(context, one) for one in dict.fromkeys((self.stream, self.kernels))
        )

    # -- resources

    def take_event(self) -> int:
        """An event that no operation uses."""
        if self._events:
            return self._events.pop()
        event = self.driver.read("cuEventCreate", self._event_flags)
        self._undo.callback(quietly, self.driver, "cuEventDestroy", event)
        return event

    def take_scratch(self, count: int) -> Scratch:
        """Scratch memory for `count` numbers that no operation uses."""
        found = self._scratches.pop() if self._scratches else None
        if found is not None and found.count >= count:
            return found
        if found is not None:
            found.close()
        return Scratch(self.driver, max(2 * FIRST_PAIRS, 1 << (count - 1).bit_length()))

    def push_ids(
        self, scratch: Scratch, blocks: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> None:
        """Bring the numbers of n pairs to the device, in the order of the kernels: n blocks, then
        n slots."""
        n = len(blocks)
        scratch.host[:n], scratch.host[n : 2 * n] = blocks, slots
        scratch.push(2 * n, self.kernels)

    def give_back(self, events: Iterable[int], scratch: Scratch | None) -> None:
        """No part of an operation runs any more: take its resources back."""
        self._events += events
        if scratch is not None:
            self._scratches.append(scratch)

    def close(self) -> None:
        """Release every resource. No work may be running. Never raises."""
        while self._scratches:
            self._scratches.pop().close()
        self._undo.close()
