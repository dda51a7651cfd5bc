"""One direction of copies between a GPU and the arena: a stream, and a thread that puts copies on
it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.base import Progress
from kvactors.data_plane.cuda.copies import Copies, LaneCounts, Scratch
from kvactors.data_plane.cuda.device import CudaDevice, checked_ids
from kvactors.data_plane.cuda.driver import CudaError
from kvactors.data_plane.cuda.gpu_stream import GpuStream
from kvactors.device.arena import Arena
from kvactors.threads import Workers


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

    def __init__(self, copies: Copies, device: CudaDevice, arena: Arena, to_device: bool) -> None:
        self.copies = copies
        self.device = device
        self.arena = arena
        self.driver = copies.driver
        self.to_device = to_device
        self.counts = LaneCounts()
        self.workers = Workers(1, f"kvactors-cuda-{'load' if to_device else 'store'}")
        self._entered = False
        self._gpu = GpuStream(self.driver)
        self.stream = self._gpu.stream

    def submit(self, op: Op) -> None:
        """Put an operation on the stream. When it raises (ValueError, DeviceError, CudaError),
        nothing of the operation runs."""
        self._enter()
        blocks, slots = checked_ids(self.device, self.arena, op.blocks, op.slots)
        self.device.ensure_in_place()
        try:
            self._enqueue(op, blocks, slots)
        except BaseException:
            self.settle()
            raise
        op.submitted = True

    def _enqueue(self, op: Op, blocks: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        ids = 0
        if self.copies.by_kernel:
            op.scratch = self._gpu.take_scratch(2 * len(blocks))
            self._gpu.push_ids(op.scratch, blocks, slots)
            ids = op.scratch.device
        roles = len(self.device.layout.roles)
        for group in op.groups:
            pieces = range(group.start * roles, group.stop * roles)
            self.copies.enqueue(
                self.to_device, blocks, slots, pieces, ids, self.stream, self.counts
            )
            op.events.append(self._gpu.take_event())
            self.driver.call("cuEventRecord", op.events[-1], self.stream)

    def _enter(self) -> None:
        if not self._entered:
            self.driver.call("cuCtxSetCurrent", self.device.context)
            self._entered = True

    def settle(self) -> bool:
        """Wait without limit until no work on the stream runs any more. Returns whether the context
        is usable."""
        return self._gpu.settle(self.device.context)

    def give_back(self, op: Op) -> None:
        """No part of an operation runs any more: release its resources."""
        self._gpu.give_back(op.events, op.scratch)
        op.scratch = None

    def close(self) -> None:
        """Release every resource. No work may be running. Never raises."""
        self._gpu.close()

    def failed(self, error: BaseException) -> bool:
        """Record a failure. Returns whether it is the driver's, after which no further operation
        should be tried."""
        self.counts.errors += 1
        return isinstance(error, CudaError)
