"""Operations on CUDA streams, from their start until no part of them runs.

A lane's thread puts an operation on its stream. No thread waits for the GPU: while operations are
in flight, the loop asks at intervals how far each stream is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.log import get_logger
from kvactors.data_plane.base import Progress
from kvactors.data_plane.cuda.copies import Copies, GpuStream, LaneCounts
from kvactors.data_plane.cuda.device import CudaDevice, checked_ids
from kvactors.data_plane.cuda.driver import FATAL, NOT_READY, UNTIMED, CudaError, quietly
from kvactors.data_plane.cuda.host_pin import Scratch
from kvactors.device.arena import Arena
from kvactors.errors import DeviceError
from kvactors.threads import Workers

# -- One direction of copies between a GPU and the arena: a stream, and a thread that puts copies on
# it.


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


class CopyStream:
    """A direction's streams with their thread. Made and closed with the device's context current.
    `submit` and `settle` run on that thread, all other methods on the loop. Raises CudaError.
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


# -- Events on the CUDA streams of an engine, and waits of these streams for copies.


class CudaEvent:
    """An event on an engine's stream."""

    def __init__(self, events: StreamEvents, handle: int) -> None:
        self._events = events
        self._handle = handle

    def query(self) -> bool:
        """Whether all work before it has completed. DeviceError."""
        return self._events.query(self._handle)

    def release(self) -> None:
        """Let the event be used again. No query may follow."""
        self._events.give_back(self._handle)


class StreamEvents:
    """The events of one device, on the loop. They are destroyed by `close`, and are recorded again
    only after they were reached.
    """

    def __init__(self, device: CudaDevice, broken: Callable[[BaseException], None]) -> None:
        self.ended = False
        self._device = device
        self._broken = broken
        self._made: list[int] = []
        self._released: list[int] = []

    def record(self, stream: int) -> CudaEvent:
        """Record an event after all work that a stream has got so far."""
        self._check()
        driver = self._device.driver
        try:
            with self._device.current():
                event = self._take()
                try:
                    driver.call("cuEventRecord", event, stream)
                except BaseException:
                    self._released.append(event)
                    raise
        except CudaError as error:
            self._note(error)
            raise
        return CudaEvent(self, event)

    def _take(self) -> int:
        for position, event in enumerate(self._released):
            if self._device.driver.status("cuEventQuery", event) == 0:
                return self._released.pop(position)
        self._made.append(self._device.driver.read("cuEventCreate", UNTIMED))
        return self._made[-1]

    def query(self, event: int) -> bool:
        """Whether an event was reached. DeviceError."""
        self._check()
        driver = self._device.driver
        try:
            with self._device.current():
                code = driver.status("cuEventQuery", event)
            if code not in (0, NOT_READY):
                raise driver.error("cuEventQuery", code)
        except CudaError as error:
            self._note(error)
            raise
        return code == 0

    def give_back(self, event: int) -> None:
        """No waiter needs an event any more."""
        self._released.append(event)

    def _check(self) -> None:
        if self.ended:
            raise DeviceError("the copy engine of this GPU is closed")

    def _note(self, error: CudaError) -> None:
        if error.code in FATAL:
            self._broken(error)

    def close(self) -> None:
        """Destroy every event, with the context current. Never raises."""
        self.ended = True
        while self._made:
            quietly(self._device.driver, "cuEventDestroy", self._made.pop())


class StreamWait:
    """An engine's stream, and the blocks whose copies it shall wait for."""

    def __init__(self, device: CudaDevice, stream: int, blocks: Sequence[int]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._device = device
        self._stream = stream
        self._missing = set(blocks)

    def add(self, op: Op) -> None:
        """Wait for an operation that is on its stream, if it brings one of the blocks. The events
        of its layers may be on several streams, so none of them stands for the others."""
        if self.done.done() or self._missing.isdisjoint(op.blocks):
            return
        try:
            with self._device.current():
                for event in op.events:
                    self._device.driver.call("cuStreamWaitEvent", self._stream, event, 0)
        except CudaError as error:
            self.done.set_exception(error)
            return
        self._missing.difference_update(op.blocks)
        if not self._missing:
            self.done.set_result(None)


FIRST_PAUSE, LAST_PAUSE = 100e-6, 2e-3
"""Seconds between two questions how far a stream is: they double as long as the answer stays the
same."""

log = get_logger()


class Operations:
    """The operations in flight of one device.

    Attributes:
        in_flight: operations that have not ended, each with its lane.
    """

    def __init__(self, device: CudaDevice, broken: Callable[[BaseException], None]) -> None:
        self.device = device
        self.in_flight: dict[Op, CopyStream] = {}
        self._broken = broken
        self._watched: list[Op] = []  # those on a stream
        self._waits: dict[StreamWait, CopyStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause = FIRST_PAUSE

    @property
    def asking(self) -> bool:
        """Whether the loop will ask a stream again."""
        return self._timer is not None

    def start(self, op: Op, lane: CopyStream) -> None:
        """Have a lane's thread put an operation on its stream."""
        self.in_flight[op] = lane
        _in_thread(
            lane, partial(lane.submit, op), lambda error, _result: self._submitted(op, error)
        )

    def abandon(self) -> None:
        """Answer every operation in flight as failed. They stay in flight until they end."""
        for op in self.in_flight:
            op.over = True
            if not op.done.done():
                op.done.set_result(False)

    def add_wait(self, wait: StreamWait, lane: CopyStream) -> None:
        """Let an engine's stream wait for operations of a lane that are on its stream, and for
        later ones as soon as they are."""
        self._waits[wait] = lane
        wait.done.add_done_callback(lambda _: self._waits.pop(wait, None))
        for op, its_lane in self.in_flight.items():
            if its_lane is lane and op.submitted and not (op.failed or op.over):
                wait.add(op)

    async def wait_ended(self) -> None:
        """Wait until every operation in flight has ended."""
        await asyncio.gather(*(op.ended for op in self.in_flight))

    def _submitted(self, op: Op, error: BaseException | None) -> None:
        if error is None:
            for wait, lane in list(self._waits.items()):
                if self.in_flight[op] is lane and not op.over:
                    wait.add(op)
            self._watched.append(op)
            self._pause = FIRST_PAUSE
            self._ask_later()
            return
        log.warning("copies could not be begun", error=str(error))
        self._note(op, error)
        self._end(op, good=False)

    def _note(self, op: Op, error: BaseException) -> None:
        if self.in_flight[op].failed(error) or not isinstance(error, (ValueError, DeviceError)):
            self._broken(error)

    def _end(self, op: Op, *, good: bool) -> None:
        lane = self.in_flight.pop(op)
        lane.give_back(op)
        op.over = True
        op.failed = not good
        op.ended.set_result(None)
        if not op.done.done():
            op.done.set_result(good)

    # -- progress of the streams

    def _ask_later(self) -> None:
        if self._timer is None and self._watched:
            self._timer = asyncio.get_running_loop().call_later(self._pause, self._ask_all)

    def _ask_all(self) -> None:
        self._timer = None
        before = sum(op.reached for op in self._watched)
        try:
            with self.device.current():
                for op in list(self._watched):
                    self._ask(op)
        except CudaError as error:
            for op in list(self._watched):
                self._fail(op, error)
        same = before == sum(op.reached for op in self._watched)
        self._pause = min(2 * self._pause, LAST_PAUSE) if same else FIRST_PAUSE
        self._ask_later()

    def _ask(self, op: Op) -> None:
        """Ask how far a stream is with an operation. An event that was reached stays reached:
        errors come later."""
        driver, before, code = self.device.driver, op.reached, 0
        while (
            op.reached < len(op.events)
            and (code := driver.status("cuEventQuery", op.events[op.reached])) == 0
        ):
            op.reached += 1
        if op.progress is not None and op.reached > before and not op.over:
            try:
                op.progress(op.groups[op.reached - 1].stop)
            except Exception as error:
                log.error("progress of layers could not be reported", error=repr(error))
        if op.reached == len(op.events):
            self._watched.remove(op)
            self._end(op, good=True)
        elif code != NOT_READY:
            self._fail(op, driver.error("cuEventQuery", code))

    def _fail(self, op: Op, error: BaseException) -> None:
        """An operation's stream reports an error: the operation ends when nothing runs on the
        stream any more."""
        if op not in self._watched:
            return
        self._watched.remove(op)
        self._note(op, error)
        lane = self.in_flight[op]
        _in_thread(lane, lane.settle, lambda _error, _alive: self._end(op, good=False))


def _in_thread(
    lane: CopyStream, call: Callable[[], Any], then: Callable[[BaseException | None, Any], None]
) -> None:
    """Call in the lane's thread, then on the loop, with the call's error and result."""
    loop = asyncio.get_running_loop()

    def done(future: Future[Any]) -> None:
        error = future.exception()
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(then, error, None if error else future.result())

    lane.workers.submit(call).add_done_callback(done)
