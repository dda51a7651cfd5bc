"""Operations on CUDA streams, from their start until no part of them runs.

A lane's thread puts an operation on its stream. No thread waits for the GPU: while operations are
in flight, the loop asks at intervals how far each stream is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import NOT_READY, CudaError
from kvactors.data_plane.cuda.lane import Lane, Op
from kvactors.data_plane.cuda.stream_events import StreamWait
from kvactors.errors import DeviceError

FIRST_PAUSE, LAST_PAUSE = 100e-6, 2e-3
"""Seconds between two questions how far a stream is: they double as long as the answer stays the
same."""

log = get_logger()


class Operations:
    """The operations in flight of one device.

    Args:
        device: the device.
        broken: called with an error after which nothing more should be copied.

    Attributes:
        in_flight: operations that have not ended, each with its lane.
    """

    def __init__(self, device: CudaDevice, broken: Callable[[BaseException], None]) -> None:
        self.device = device
        self.in_flight: dict[Op, Lane] = {}
        self._broken = broken
        self._watched: list[Op] = []  # those on a stream
        self._waits: dict[StreamWait, Lane] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._pause = FIRST_PAUSE

    @property
    def asking(self) -> bool:
        """Whether the loop will ask a stream again."""
        return self._timer is not None

    def start(self, op: Op, lane: Lane) -> None:
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

    def add_wait(self, wait: StreamWait, lane: Lane) -> None:
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
    lane: Lane, call: Callable[[], Any], then: Callable[[BaseException | None, Any], None]
) -> None:
    """Call in the lane's thread, then on the loop, with the call's error and result."""
    loop = asyncio.get_running_loop()

    def done(future: Future[Any]) -> None:
        error = future.exception()
        with suppress(RuntimeError):  # the loop is closed: no caller waits
            loop.call_soon_threadsafe(then, error, None if error else future.result())

    lane.workers.submit(call).add_done_callback(done)
