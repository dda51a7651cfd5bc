"""One direction of copies between a GPU and the arena: a stream, and a thread that puts copies on
it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvactors.data_plane.base import Progress
from kvactors.data_plane.cuda.copies import Copies, LaneCounts
from kvactors.data_plane.cuda.device import CudaDevice, checked_ids
from kvactors.data_plane.cuda.driver import CudaError
from kvactors.data_plane.cuda.gpu_stream import GpuStream
from kvactors.data_plane.cuda.scratch import Scratch
from kvactors.device.arena import Arena
from kvactors.threads import Workers


class Op:
    """An operation of n pairs.

    Attributes:
        groups: the layers it goes by, counted from the layout's first. None: all at once.
        done: whether all bytes arrived. Set on the loop, when no part of the operation runs any
            more.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        groups: list[range],
        progress: Progress | None,
        done: asyncio.Future[bool],
    ) -> None:
        self.blocks, self.slots, self.groups = blocks, slots, groups
        self.progress, self.done = progress, done
        self.events: list[int] = []  # one a group
        self.reached = 0  # events that have been reached
        self.scratch: Scratch | None = None
        self.submitted = self.over = self.failed = False
        # set when no part of it runs any more, although it was abandoned
        self.ended: asyncio.Future[None] = done.get_loop().create_future()


class Lane:
    """A direction's streams with their thread. Made and closed with the device's context current.
    `submit` and `settle` run on that thread, all other methods on the loop. Raises CudaError.

    Attributes:
        gpu: the streams.
    """

    def __init__(
        self,
        copies: Copies,
        device: CudaDevice,
        arena: Arena,
        *,
        to_device: bool,
        staging_bytes: int,
    ) -> None:
        self.copies = copies
        self.device = device
        self.arena = arena
        self.driver = copies.driver
        self.counts = LaneCounts()
        self.workers = Workers(1, f"kvactors-cuda-{'load' if to_device else 'store'}")
        self._entered = False
        self.gpu = GpuStream(self.driver, to_device=to_device, staging_bytes=staging_bytes)

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
        order = np.argsort(slots, kind="stable")  # neighbours are copied together
        blocks, slots = blocks[order], slots[order]
        if self.copies.by_kernel:
            op.scratch = self.gpu.take_scratch(2 * len(blocks))
            self.gpu.push_ids(op.scratch, blocks, slots)
            ids = op.scratch.device
        roles = len(self.device.layout.roles)
        for group in op.groups:
            pieces = range(group.start * roles, group.stop * roles)
            self.copies.enqueue(blocks, slots, pieces, ids, self.gpu, self.counts)
            op.events.append(self.gpu.take_event())
            self.gpu.record(op.events[-1])

    def _enter(self) -> None:
        if not self._entered:
            self.driver.call("cuCtxSetCurrent", self.device.context)
            self._entered = True

    def settle(self) -> bool:
        """Wait without limit until no work on the streams runs any more. Returns whether the
        context is usable."""
        return self.gpu.settle(self.device.context)

    def give_back(self, op: Op) -> None:
        """No part of an operation runs any more: release its resources."""
        self.gpu.give_back(op.events, op.scratch)
        op.scratch = None

    def close(self) -> None:
        """Release every resource. No work may be running. Never raises."""
        self.gpu.close()

    def failed(self, error: BaseException) -> bool:
        """Record a failure. Returns whether it is the driver's, after which no further operation
        should be tried."""
        self.counts.errors += 1
        return isinstance(error, CudaError)
