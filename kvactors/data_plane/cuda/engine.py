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
from typing import NamedTuple

import anyio

from kvactors.actor.log import get_logger
from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.data_plane.base import CLOSE_LIMIT, Direction, Progress
from kvactors.data_plane.cuda.copies import Copies, HostSlotPlan, Transfer
from kvactors.data_plane.cuda.device import CudaDevice, checked_ids
from kvactors.data_plane.cuda.driver import (
    FATAL,
    NOT_READY,
    UNTIMED,
    CudaDriver,
    CudaError,
    quietly,
)
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
        errors: failed operations.
        bytes_to_host, bytes_to_device: bytes put on the stream, arrived or not.
        batch_from: bytes from which on the copy engines move a piece.
        has_batch: whether the driver copies many pieces with one call.
        has_kernel: whether the copy kernel works.
        broken: why copies are impossible from now on, or None.
    """

    batches: int = 0
    launches: int = 0
    singles: int = 0
    errors: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    batch_from: int = 0
    has_batch: bool = False
    has_kernel: bool = False
    broken: str | None = None


@dataclass(eq=False)
class Op:
    """An operation of n pairs. groups: the layers it goes by, counted from the layout's first.
    done: whether all bytes arrived, set when no part of the operation runs any more or when it was
    abandoned. ended: set when no part of it runs any more. submitted: whether all of it is on the
    stream."""

    transfer: Transfer
    blocks: Sequence[int]
    slots: Sequence[int]
    groups: list[range]
    progress: Progress | None
    done: asyncio.Future[bool]
    ended: asyncio.Future[None]
    submitted: bool = False
    over: bool = False


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
                for event in op.transfer.events:
                    self._device.driver.call("cuStreamWaitEvent", self._stream, event, 0)
        except CudaError as error:
            self.done.set_exception(error)
            return
        self._missing.difference_update(op.blocks)
        if not self._missing:
            self.done.set_result(None)


class CudaCopyEngine(CopyEngine):
    """Copies by streams of a GPU. Every operation fails before `open`, and after an error of the
    driver, because the state of the GPU's work is then unknown. batch_from: bytes of a piece from
    which on it goes by the copy engines in place of the kernel. limit: seconds that `close` waits
    for copies in flight."""

    device: CudaDevice

    def __init__(
        self,
        device: CudaDevice,
        arena: Arena,
        *,
        batch_from: int | None = None,
        limit: float = CLOSE_LIMIT,
    ) -> None:
        super().__init__(device, arena)
        self._batch_from = batch_from
        self._limit = limit
        self._undo = ExitStack()
        self._copies: Copies | None = None
        self._workers = {
            to_device: Workers(1, f"kvactors-cuda-{'load' if to_device else 'store'}")
            for to_device in (False, True)
        }
        self._closed = False
        self._reported = False, False  # whether copies broke off, and whether memory was lost
        self._in_flight: list[Op] = []
        self._watched: list[Op] = []  # those on a stream
        self._waits: set[StreamWait] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._pause = FIRST_PAUSE
        self._events = StreamEvents(device, self._break)

    @property
    def trouble(self) -> str:
        if self._copies is not None and self._copies.broken:
            return self._copies.broken
        return "closed" if self._closed else ""

    # -- opening and closing

    async def open(self) -> None:
        """Pin the arena, make streams, load the kernels. CudaError: nothing is left behind."""
        if self._copies is None and not self._closed:
            await in_thread(self._open, "kvactors-cuda-open")

    def _open(self) -> None:
        arena, undo = self.arena, self._undo
        plan = HostSlotPlan(
            arena.address,
            max(1, arena.num_slots) * arena.stride,
            offset=0,
            row_stride=arena.stride,
            slots_per_row=1,
            num_slots=arena.num_slots,
        )
        with self.device.current():
            try:
                undo.callback(self._events.close)
                self._copies = Copies(self.device, plan, undo, batch_from=self._batch_from)
            except BaseException:
                undo.close()
                raise

    async def close(self) -> None:
        """Wait for copies in flight, then release every resource. The memory of copies that do not
        end within the limit is never freed."""
        closed, self._closed = self._closed, True
        self._events.ended = True
        if closed or self._copies is None:
            return
        with anyio.move_on_after(self._limit):
            for workers in self._workers.values():
                await workers.drained(self._limit)
            await asyncio.gather(*(op.ended for op in self._in_flight))
        if self._in_flight or any(workers.busy for workers in self._workers.values()):
            self.device.abandon(self._undo.pop_all(), self.arena, self.arena.view(0))
        else:
            await in_thread(self._give_back, "kvactors-cuda-close")
        for workers in self._workers.values():
            workers.close()

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
        if not len(blocks):
            return ()
        copies = self._copies
        if copies is None or self.trouble:
            return tuple(range(len(blocks)))
        if direction is Direction.WITHIN:
            return await self._copy_within(copies, blocks, slots)
        load = direction is Direction.TO_DEVICE
        groups = self.layer_groups(len(blocks), GROUP) if load else self.layer_groups(1, 1 << 62)
        loop = asyncio.get_running_loop()
        ends = loop.create_future(), loop.create_future()
        op = Op(Transfer(load), blocks, slots, groups, progress if load else None, *ends)
        self._in_flight.append(op)
        put = self._workers[load].submit(partial(self._put, copies, op))
        on_loop(put, partial(self._submitted, copies, op))
        good = await wait_uncancelled(op.done)
        return () if good else tuple(range(len(blocks)))

    async def _copy_within(
        self, copies: Copies, sources: Sequence[int], targets: Sequence[int]
    ) -> tuple[int, ...]:
        """Copy in a thread, which waits for the GPU for microseconds."""
        copied = self._workers[True].submit(partial(self.device.copy_blocks, sources, targets))
        try:
            await wait_uncancelled(asyncio.wrap_future(copied))
        except Exception as error:
            copies.lanes[True].errors += 1
            if isinstance(error, CudaError):
                self._break(error)
            return tuple(range(len(sources)))
        return ()

    def _put(self, copies: Copies, op: Op) -> None:
        """In the direction's thread: put an operation on its stream. When this raises (ValueError,
        DeviceError, CudaError), nothing of the operation runs."""
        device = self.device
        with device.current():
            blocks, slots = checked_ids(device, self.arena, op.blocks, op.slots)
            device.ensure_in_place()
            groups = [device.layout.span(group) for group in op.groups]
            copies.submit(op.transfer, blocks, slots, groups)
        op.submitted = not op.transfer.error

    def _submitted(self, copies: Copies, op: Op, error: BaseException | None) -> None:
        if error is not None:
            log.warning("copies could not be begun", error=str(error))
            if isinstance(error, CudaError) or not isinstance(error, (ValueError, DeviceError)):
                self._break(error)
            self._end(copies, op, good=False)
            return
        self._report()
        if op.submitted and not op.over and op.transfer.to_device:
            for wait in list(self._waits):
                wait.add(op)
        self._watched.append(op)
        self._pause = FIRST_PAUSE
        self._ask_later(copies)

    def _end(self, copies: Copies, op: Op, *, good: bool) -> None:
        lane = copies.lanes[op.transfer.to_device]
        lane.errors += not good
        lane.give_back(op.transfer)
        self._in_flight.remove(op)
        op.over = True
        op.ended.set_result(None)
        if not op.done.done():
            op.done.set_result(good)

    # -- progress of the streams

    def _ask_later(self, copies: Copies) -> None:
        if self._timer is None and self._watched:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._pause, self._ask_all, copies)

    def _ask_all(self, copies: Copies) -> None:
        self._timer = None
        same = True
        for op in list(self._watched):
            before = op.transfer.reached
            ended = copies.ask(op.transfer)
            same &= op.transfer.reached == before
            if op.progress is not None and op.transfer.reached > before and not op.over:
                try:
                    op.progress(op.groups[op.transfer.reached - 1].stop)
                except Exception as error:
                    log.error("progress of layers could not be reported", error=repr(error))
            if ended:
                self._watched.remove(op)
                self._end(copies, op, good=not op.transfer.error)
        self._report()
        self._pause = min(2 * self._pause, LAST_PAUSE) if same else FIRST_PAUSE
        self._ask_later(copies)

    # -- for engines

    def make_stream_wait(self, stream: int, blocks: Sequence[int], layer: int) -> bool:
        """See `EngineStreams`. Copies that are not on their stream yet are not waited for."""
        missing = set(blocks)
        loads = [
            op
            for op in self._in_flight
            if op.transfer.to_device and not missing.isdisjoint(op.blocks)
        ]
        if any(op.transfer.error or op.over or not op.submitted for op in loads):
            return False
        if missing.difference(*(op.blocks for op in loads)):
            return False
        with self.device.current():
            for op in loads:
                group = next(i for i, layers in enumerate(op.groups) if layer in layers)
                event = op.transfer.events[group]
                self.device.driver.call("cuStreamWaitEvent", stream, event, 0)
        return True

    def check_streams(self) -> None:
        """They are in reach."""

    def begin_stream_wait(self, stream: int, blocks: Sequence[int]) -> asyncio.Future[None] | None:
        if self._copies is None or self._closed:
            return None
        wait = StreamWait(self.device, stream, blocks)
        self._waits.add(wait)
        wait.done.add_done_callback(lambda _: self._waits.discard(wait))
        for op in self._in_flight:
            if op.transfer.to_device and op.submitted and not (op.transfer.error or op.over):
                wait.add(op)
        return wait.done

    def record_event(self, stream: int) -> StreamEvent:
        return self._events.record(stream)

    # -- status

    def _break(self, error: BaseException) -> None:
        if self._copies is not None:
            self._copies.break_off(error)
            self._report()

    def _report(self) -> None:
        """Report on the loop that copies broke off, which any thread may find."""
        copies = self._copies
        if copies is None or (bool(copies.broken), copies.lost) == self._reported:
            return
        self._reported = True, copies.lost
        if self.broke is not None:
            self.broke(copies.lost)

    def statistics(self) -> CudaStatistics:
        copies = self._copies
        if copies is None or self._closed:
            return CudaStatistics(broken=self.trouble or None)
        lanes = copies.lanes.values()
        totals = {
            name: sum(getattr(lane, name) for lane in lanes)
            for name in ("batches", "launches", "singles", "errors")
        }
        return CudaStatistics(
            **totals,
            bytes_to_host=copies.lanes[False].bytes,
            bytes_to_device=copies.lanes[True].bytes,
            batch_from=copies.batch_from,
            has_batch=copies.has_batch,
            has_kernel=copies.kernels is not None,
            broken=self.trouble or None,
        )
