"""Copy engine between a GPU and the arena, with its own streams. Copies never block the loop, and
no thread waits for the GPU.

One thread for each direction puts copies on its stream. While copies are in flight the loop asks
at intervals how far each stream is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import anyio

from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.data_plane.base import CLOSE_LIMIT, Direction, Progress
from kvactors.data_plane.cuda.copies import (
    Calibration,
    Choice,
    Copies,
    GpuStream,
    LaneCounts,
    RunTiming,
    Timing,
    Transfer,
    calibrate,
)
from kvactors.data_plane.cuda.device import CudaDevice, checked_ids
from kvactors.data_plane.cuda.driver import (
    FATAL,
    NOT_READY,
    UNTIMED,
    CudaDriver,
    CudaError,
    quietly,
)
from kvactors.data_plane.cuda.host_pin import STAGING_BYTES, HostPin
from kvactors.data_plane.engine import CopyEngine, on_loop
from kvactors.device.arena import Arena
from kvactors.device.events import StreamEvent
from kvactors.errors import DeviceError
from kvactors.threads import Workers, in_thread

GROUP = 1 << 20
"""Bytes from which on a run of layers gets a separate event."""

FIRST_PAUSE, LAST_PAUSE = 100e-6, 2e-3
"""Seconds between two questions how far a stream is: they double as long as the answer stays the
same."""

log = get_logger()


class CudaStatistics(NamedTuple):
    """Totals since `open`.

    Attributes:
        batches: calls for many copies.
        launches: launches of the copy kernel.
        singles: calls for one copy.
        bytes_to_host: bytes put on the stream to the host, whether they arrived or not.
        bytes_to_device: bytes put on the stream to the device, whether they arrived or not.
        errors: operations that failed.
        batch_from: bytes from which on a piece goes by the copy engines.
        timings: the measurements behind that choice, empty if there were none.
        has_batch: whether the driver copies many pieces with one call.
        has_kernel: whether the copy kernel can be used.
        broken: why copies are impossible from now on, or None.
        staged: halves of the buffers for small pieces that were filled.
        rectangles: calls for the pieces of neighbouring blocks.
        stage_from: bytes of small pieces from which on they are gathered on the device.
        merge_from: neighbouring blocks from which on a piece of theirs is one copy.
        run_timings: the measurements behind that choice, empty if there were none.
        staging_bytes: device memory of the buffers for small pieces.
    """

    batches: int
    launches: int
    singles: int
    bytes_to_host: int
    bytes_to_device: int
    errors: int
    batch_from: int
    timings: tuple[Timing, ...]
    has_batch: bool
    has_kernel: bool
    broken: str | None
    staged: int
    rectangles: int
    stage_from: int
    merge_from: int
    run_timings: tuple[RunTiming, ...]
    staging_bytes: int


@dataclass(eq=False)
class Op(Transfer):
    """An operation of n pairs. groups: the layers it goes by, counted from the layout's first.
    reached: how many of the events have been. done: whether all bytes arrived, set when no part of
    the operation runs any more or when it was abandoned. ended: set when no part of it runs any
    more."""

    lane: GpuStream
    blocks: Sequence[int]
    slots: Sequence[int]
    groups: list[range]
    progress: Progress | None
    done: asyncio.Future[bool]
    ended: asyncio.Future[None]
    reached: int = 0
    submitted: bool = False
    over: bool = False
    failed: bool = False


# -- Events on the CUDA streams of an engine, and waits of these streams for copies.


class StreamEvents:
    """The events of one device, on the loop. They are destroyed by `close`, and are recorded again
    only after they were reached."""

    def __init__(self, device: CudaDevice, broken: Callable[[BaseException], None]) -> None:
        self.ended = False
        self._device = device
        self._broken = broken
        self._made: list[int] = []
        self._released: list[int] = []

    @contextmanager
    def _driver(self) -> Iterator[CudaDriver]:
        """The driver, with the context current. DeviceError if the copy engine is closed."""
        if self.ended:
            raise DeviceError("the copy engine of this GPU is closed")
        try:
            with self._device.current():
                yield self._device.driver
        except CudaError as error:
            if error.code in FATAL:
                self._broken(error)
            raise

    def record(self, stream: int) -> StreamEvent:
        """Record an event after all work that a stream has got so far. DeviceError."""
        with self._driver() as driver:
            event = self._take()
            try:
                driver.call("cuEventRecord", event, stream)
            except BaseException:
                self._released.append(event)
                raise
        return StreamEvent(self, event)

    def _take(self) -> int:
        for position, event in enumerate(self._released):
            if self._device.driver.status("cuEventQuery", event) == 0:
                return self._released.pop(position)
        self._made.append(self._device.driver.read("cuEventCreate", UNTIMED))
        return self._made[-1]

    def query(self, event: int) -> bool:
        """Whether an event was reached. DeviceError."""
        with self._driver() as driver:
            code = driver.status("cuEventQuery", event)
            if code not in (0, NOT_READY):
                raise driver.error("cuEventQuery", code)
        return code == 0

    def give_back(self, event: int) -> None:
        self._released.append(event)

    def close(self) -> None:
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


class CudaCopyEngine(CopyEngine):
    """Copies by streams of a GPU. Every operation fails before `open`, and after an error of the
    driver, because the state of the GPU's work is then unknown. batch_from, stage_from, merge_from:
    see `Choice`, None: measured by `open`. staging_bytes: device memory of each direction that
    small pieces are gathered in, 0 for none. limit: seconds that `close` waits for copies in
    flight."""

    device: CudaDevice

    def __init__(
        self,
        device: CudaDevice,
        arena: Arena,
        *,
        batch_from: int | None = None,
        stage_from: int | None = None,
        merge_from: int | None = None,
        staging_bytes: int = STAGING_BYTES,
        limit: float = CLOSE_LIMIT,
    ) -> None:
        super().__init__(device, arena)
        given = {"batch_from": batch_from, "stage_from": stage_from, "merge_from": merge_from}
        self._given = {name: value for name, value in given.items() if value is not None}
        self._staging_bytes = staging_bytes
        self._limit = limit
        self._undo = ExitStack()
        self._lanes: dict[Direction, GpuStream] = {}
        self._calibration = Calibration()
        self._copies: Copies | None = None
        self._workers = {
            to_device: Workers(1, f"kvactors-cuda-{'load' if to_device else 'store'}")
            for to_device in (False, True)
        }
        self._broken: str | None = None
        self._lost = self._unacknowledged = False
        self._changed: Callable[[bool, bool], None] | None = None
        self._in_flight: list[Op] = []
        self._watched: list[Op] = []  # those on a stream
        self._waits: dict[StreamWait, GpuStream] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause = FIRST_PAUSE
        self._events = StreamEvents(device, self._break)

    @property
    def trouble(self) -> str:
        return self._broken or ""

    # -- opening and closing

    async def open(self) -> None:
        """Pin the arena, make streams, load the kernels, measure. CudaError: nothing is left
        behind."""
        if not self._lanes and self._broken is None:
            await in_thread(self._open, "kvactors-cuda-open")

    def _open(self) -> None:
        device, arena, undo = self.device, self.arena, self._undo
        with device.current():
            try:
                undo.callback(self._events.close)
                pin = HostPin(device, arena.address, max(1, arena.num_slots) * arena.stride)
                undo.callback(pin.release)
                slots = arena.address, arena.stride, pin.on_device, arena.stride
                copies = self._copies = Copies(
                    device, *slots, undo, staging_bytes=self._staging_bytes
                )
                to_device = copies.streams[True]
                self._calibration = calibrate(copies, to_device, self._given)
                copies.split(self._calibration.choice, to_device.stream)
            except BaseException:
                self._copies = None
                undo.close()
                raise
        self._lanes = {
            Direction.TO_HOST: copies.streams[False],
            Direction.TO_DEVICE: copies.streams[True],
        }

    async def close(self) -> None:
        """Wait for copies in flight, then release every resource. The memory of copies that do not
        end within the limit is never freed."""
        lanes, self._lanes = self._lanes, {}
        self._broken = self._broken or "closed"
        self._events.ended = True
        if not lanes:
            return
        settled = [
            asyncio.wrap_future(
                self._workers[lane.to_device].submit(partial(lane.settle, self.device.context))
            )
            for lane in lanes.values()
        ]
        with anyio.move_on_after(self._limit):
            await asyncio.gather(*settled)
            await asyncio.gather(*(op.ended for op in self._in_flight))
        if (
            all(one.done() and not one.cancelled() and one.exception() is None for one in settled)
            and not self._in_flight
        ):
            await in_thread(self._give_back, "kvactors-cuda-close")
        else:
            self.device.abandon(self._undo.pop_all(), self.arena, self.arena.view(0))
        for workers in self._workers.values():
            workers.close()
        self._copies = None

    def _give_back(self) -> None:
        with ExitStack() as entered:
            try:
                entered.enter_context(self.device.current())
            except CudaError:  # perhaps temporary. Without a context no resource can be released
                with suppress(CudaError):
                    entered.enter_context(self.device.current())
            self._undo.close()

    def abandon_pending(self) -> None:
        """Answer every operation in flight as failed. The GPU may still execute them. `close` waits
        for them."""
        for op in self._in_flight:
            op.over = True
            if not op.done.done():
                op.done.set_result(False)

    # -- operations

    async def run(
        self,
        direction: Direction,
        blocks: Sequence[int],
        slots: Sequence[int],
        progress: Progress | None = None,
    ) -> tuple[int, ...]:
        """See `CopyEngine`. All pairs arrive or none."""
        within = direction is Direction.WITHIN
        lane = self._lanes.get(Direction.TO_DEVICE if within else direction)
        if not len(blocks):
            return ()
        if lane is None or self._broken is not None:
            return tuple(range(len(blocks)))
        if within:
            return await self._copy_within(lane, blocks, slots)
        load = direction is Direction.TO_DEVICE
        groups = self.layer_groups(len(blocks), GROUP) if load else self.layer_groups(1, 1 << 62)
        loop = asyncio.get_running_loop()
        ends = loop.create_future(), loop.create_future()
        op = Op(lane, blocks, slots, groups, progress if load else None, *ends)
        self._in_flight.append(op)
        self._in_thread(lane, partial(self._put, op), lambda error: self._submitted(op, error))
        good = await wait_uncancelled(op.done)
        return () if good else tuple(range(len(blocks)))

    async def _copy_within(
        self, lane: GpuStream, sources: Sequence[int], targets: Sequence[int]
    ) -> tuple[int, ...]:
        """Copy in a lane's thread, which waits for the GPU for microseconds."""
        copies = self._workers[lane.to_device].submit(
            partial(self.device.copy_blocks, sources, targets)
        )
        try:
            await wait_uncancelled(asyncio.wrap_future(copies))
        except Exception as error:
            lane.counts.errors += 1
            if isinstance(error, CudaError):
                self._break(error)
            return tuple(range(len(sources)))
        return ()

    def _in_thread(
        self, lane: GpuStream, call: Callable[[], Any], then: Callable[[BaseException | None], None]
    ) -> None:
        """Call in the lane's thread, then on the loop, with the call's error."""
        on_loop(self._workers[lane.to_device].submit(call), then)

    def _put(self, op: Op) -> None:
        """In the lane's thread: put an operation on its stream. When this raises (ValueError,
        DeviceError, CudaError), nothing of the operation runs."""
        device = self.device
        device.driver.call("cuCtxSetCurrent", device.context)
        blocks, slots = checked_ids(device, self.arena, op.blocks, op.slots)
        device.ensure_in_place()
        copies, roles = self._copies, len(device.layout.roles)
        assert copies is not None
        groups = [range(group.start * roles, group.stop * roles) for group in op.groups]
        copies.prepare(op, len(blocks), len(groups), op.lane)
        try:
            copies.put(op, blocks, slots, groups, op.lane)
        except BaseException:
            op.lane.settle(device.context)
            raise
        op.submitted = True

    def _submitted(self, op: Op, error: BaseException | None) -> None:
        if error is None:
            for wait, lane in list(self._waits.items()):
                if op.lane is lane and not op.over:
                    wait.add(op)
            self._watched.append(op)
            self._pause = FIRST_PAUSE
            self._ask_later()
            return
        log.warning("copies could not be begun", error=str(error))
        self._note(op, error)
        self._end(op, good=False)

    def _note(self, op: Op, error: BaseException) -> None:
        """Count a failure. After one of the driver, no further operation is tried."""
        op.lane.counts.errors += 1
        if isinstance(error, CudaError) or not isinstance(error, (ValueError, DeviceError)):
            self._break(error)

    def _end(self, op: Op, *, good: bool) -> None:
        self._in_flight.remove(op)
        op.lane.give_back(op)
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
        self._watched.remove(op)
        self._note(op, error)
        settle = partial(op.lane.settle, self.device.context)
        self._in_thread(op.lane, settle, lambda _error: self._end(op, good=False))

    # -- for engines

    def make_stream_wait(self, stream: int, blocks: Sequence[int], layer: int) -> bool:
        """See `EngineStreams`. Copies that are not on their stream yet are not waited for."""
        lane, missing = self._lanes.get(Direction.TO_DEVICE), set(blocks)
        loads = [
            op for op in self._in_flight if op.lane is lane and not missing.isdisjoint(op.blocks)
        ]
        if any(op.failed or op.over or not op.submitted for op in loads):
            return False
        if missing.difference(*(op.blocks for op in loads)):
            return False
        with self.device.current():
            for op in loads:
                group = next(i for i, layers in enumerate(op.groups) if layer in layers)
                self.device.driver.call("cuStreamWaitEvent", stream, op.events[group], 0)
        return True

    def check_streams(self) -> None:
        """They are in reach."""

    def begin_stream_wait(self, stream: int, blocks: Sequence[int]) -> asyncio.Future[None] | None:
        lane = self._lanes.get(Direction.TO_DEVICE)
        if lane is None:
            return None
        wait = StreamWait(self.device, stream, blocks)
        self._waits[wait] = lane
        wait.done.add_done_callback(lambda _: self._waits.pop(wait, None))
        for op in self._in_flight:
            if op.lane is lane and op.submitted and not (op.failed or op.over):
                wait.add(op)
        return wait.done

    def record_event(self, stream: int) -> StreamEvent:
        return self._events.record(stream)

    # -- status

    def _break(self, error: BaseException) -> None:
        """Copy nothing more. Operations in flight end."""
        lost = isinstance(error, CudaError) and error.code in FATAL
        if self._broken is None or (lost and not self._lost):
            self._broken = str(error)
            self._lost |= lost
            self._unacknowledged |= lost
            log.error(
                "no more copies of this GPU's memory",
                gpu=self.device.name,
                error=str(error),
                memory_lost=lost,
            )
            if self._changed is not None:
                self._changed(False, lost)

    def on_status(self, changed: Callable[[bool, bool], None]) -> None:
        self._changed = changed
        if self._broken is not None:
            changed(False, self._unacknowledged)

    def acknowledge_loss(self) -> None:
        self._unacknowledged = False

    def statistics(self) -> CudaStatistics:
        counts = {direction: lane.counts for direction, lane in self._lanes.items()}
        to_host = counts.get(Direction.TO_HOST, LaneCounts())
        to_device = counts.get(Direction.TO_DEVICE, LaneCounts())
        sums = "batches", "launches", "singles", "errors", "staged", "rectangles"
        totals: dict[str, Any] = {
            name: getattr(to_host, name) + getattr(to_device, name) for name in sums
        }
        copies = self._copies
        choice = Choice(0, 0, 0) if copies is None else copies.choice
        buffers = [lane.buffer for lane in self._lanes.values()]
        return CudaStatistics(
            **totals,
            **choice._asdict(),
            bytes_to_host=to_host.bytes,
            bytes_to_device=to_device.bytes,
            timings=self._calibration.timings,
            run_timings=self._calibration.runs,
            has_batch=copies is not None and copies.has_batch,
            has_kernel=copies is not None and copies.kernels is not None,
            broken=self._broken,
            staging_bytes=sum(2 * buffer.half_bytes for buffer in buffers if buffer is not None),
        )
