"""A stream of a GPU, with the events and the scratch memory of its operations."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.cuda.context import quietly
from kvactors.data_plane.cuda.copies import Scratch
from kvactors.data_plane.cuda.driver import NON_BLOCKING, UNTIMED, CudaDriver

FIRST_PAIRS = 1024
"""Pairs for which scratch memory is allocated at start. A larger operation replaces it with a
larger one."""


class GpuStream:
    """A stream. Made and closed with the GPU's context current. Raises CudaError.

    Args:
        driver: the GPU's.
        event_flags: of the events.

    Attributes:
        stream: the driver's handle.
    """

    def __init__(self, driver: CudaDriver, event_flags: int = UNTIMED) -> None:
        self.driver = driver
        self._event_flags = event_flags
        self._undo = ExitStack()
        self._events: list[int] = []
        self._scratches: list[Scratch] = []
        try:
            self.stream = driver.read("cuStreamCreate", NON_BLOCKING)
            self._undo.callback(quietly, driver, "cuStreamDestroy", self.stream)
            self._scratches.append(Scratch(driver, 2 * FIRST_PAIRS))
        except BaseException:
            self.close()
            raise

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
        """Bring the numbers of n pairs to the device, in the stream's order: n blocks, then n
        slots."""
        n = len(blocks)
        scratch.host[:n], scratch.host[n : 2 * n] = blocks, slots
        scratch.push(2 * n, self.stream)

    def give_back(self, events: Iterable[int], scratch: Scratch | None) -> None:
        """No part of an operation runs any more: take its resources back."""
        self._events += events
        if scratch is not None:
            self._scratches.append(scratch)

    def settle(self, context: int) -> bool:
        """Wait without limit until no work on the stream runs any more. Returns whether the context
        is usable."""
        return self.driver.settle(context, self.stream)

    def close(self) -> None:
        """Release every resource. No work may be running. Never raises."""
        while self._scratches:
            self._scratches.pop().close()
        self._undo.close()
