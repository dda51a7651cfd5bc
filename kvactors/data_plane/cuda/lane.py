"""One direction of copies between a GPU and the arena: a stream, and a thread that puts copies on
it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.base import Progress
from kvactors.data_plane.cuda.copies import Copies, LaneCounts, Scratch
from kvactors.data_plane.cuda.device import checked_ids, quietly
from kvactors.data_plane.cuda.driver import NON_BLOCKING, UNTIMED, CudaError
from kvactors.threads import Workers

FIRST_PAIRS = 1024
"""Pairs for which scratch memory is allocated at start. A larger operation replaces it with a
larger one."""


class Op:
    """An operation of n pairs.

    Attributes:
        groups: the layers it goes by, counted from the layout's first. None: all at once.
        token: counts operations.
        done: whether all bytes arrived. Set on the loop, when no part of the operation runs any
            more.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        groups: list[range],
        token: int,
        progress: Progress | None,
        done: asyncio.Future[bool],
    ) -> None:
        self.blocks, self.slots, self.groups, self.token, self.progress, self.done = (
            blocks,
            slots,
            groups,
            token,
            progress,
            done,
        )
        self.events: list[int] = []  # one a group
        self.reached = 0  # events that have been reached
        self.scratch: Scratch | None = None
        self.submitted = self.over = self.failed = False
        # set when no part of it runs any more, although it was abandoned
        self.ended: asyncio.Future[None] = done.get_loop().create_future()


class Lane:
    """A stream with its thread. Made and closed with the device's context current. `submit`,
    `settle` and `teardown` run on that thread, all other methods on the loop. Raises CudaError."""

    def __init__(self, copies: Copies, to_device: bool) -> None:
        self.copies = copies
        self.driver = copies.driver
        self.to_device = to_device
        self.counts = LaneCounts()
        self.workers = Workers(1, f"kvactors-cuda-{'load' if to_device else 'store'}")
        self._undo = ExitStack()
        self._events: list[int] = []
        self._scratches: list[Scratch] = []
        self._entered = False
        try:
            self.stream = self.driver.read("cuStreamCreate", NON_BLOCKING)
            self._undo.callback(quietly, self.driver, "cuStreamDestroy", self.stream)
            self._scratches.append(Scratch(self.driver, 2 * FIRST_PAIRS))
        except BaseException:
            self.close()
            raise

    def submit(self, op: Op) -> None:
        """Put an operation on the stream. When it raises (ValueError, DeviceError, CudaError),
        nothing of the operation runs."""
        self._enter()
        device = self.copies.device
        blocks, slots = checked_ids(device, self.copies.arena, op.blocks, op.slots)
        device.ensure_in_place()
        try:
            self._enqueue(op, blocks, slots)
        except BaseException:
            self.settle()
            raise
        op.submitted = True

    def _enqueue(self, op: Op, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        ids, n = 0, len(blocks)
        if self.copies.by_kernel:
            op.scratch = scratch = self._take_scratch(2 * n)
            scratch.host[:n], scratch.host[n : 2 * n] = blocks, slots
            scratch.push(2 * n, self.stream)
            ids = scratch.device
        roles = len(self.copies.device.layout.roles)
        for group in op.groups:
            pieces = range(group.start * roles, group.stop * roles)
            self.copies.enqueue(
                self.to_device, blocks, slots, pieces, ids, self.stream, self.counts
            )
            op.events.append(self._take_event())
            self.driver.call("cuEventRecord", op.events[-1], self.stream)

    def _enter(self) -> None:
        if not self._entered:
            self.driver.call("cuCtxSetCurrent", self.copies.device.context)
            self._entered = True

    def settle(self) -> bool:
        """Wait without limit until no work on the stream runs any more. Returns whether the context
        is usable."""
        return self.driver.settle(self.copies.device.context, self.stream)

    # -- resources of operations

    def _take_event(self) -> int:
        if self._events:
            return self._events.pop()
        event = self.driver.read("cuEventCreate", UNTIMED)
        self._undo.callback(quietly, self.driver, "cuEventDestroy", event)
        return event

    def _take_scratch(self, count: int) -> Scratch:
        found = self._scratches.pop() if self._scratches else None
        if found is not None and found.count >= count:
            return found
        if found is not None:
            found.close()
        return Scratch(self.driver, max(2 * FIRST_PAIRS, 1 << (count - 1).bit_length()))

    def give_back(self, op: Op) -> None:
        """No part of an operation runs any more: release its resources."""
        self._events += op.events
        if op.scratch is not None:
            self._scratches.append(op.scratch)
            op.scratch = None

    def close(self) -> None:
        """Release every resource. No work may be running. Never raises."""
        while self._scratches:
            self._scratches.pop().close()
        self._undo.close()

    def failed(self, error: BaseException) -> bool:
        """Record a failure. Returns whether it is the driver's, after which no further operation
        should be tried."""
        self.counts.errors += 1
        return isinstance(error, CudaError)
