"""Events on the CUDA streams of an engine, and waits of these streams for copies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvactors.data_plane.cuda.context import quietly
from kvactors.data_plane.cuda.device import CudaDevice
from kvactors.data_plane.cuda.driver import FATAL, NOT_READY, UNTIMED, CudaError
from kvactors.data_plane.cuda.lane import Op
from kvactors.errors import DeviceError


class StreamEvent:
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

    Args:
        device: the device.
        broken: called with an error after which the context runs nothing more.

    Attributes:
        ended: whether no event may be used any more.
    """

    def __init__(self, device: CudaDevice, broken: Callable[[BaseException], None]) -> None:
        self.ended = False
        self._device = device
        self._broken = broken
        self._made: list[int] = []
        self._released: list[int] = []

    def record(self, stream: int) -> StreamEvent:
        """Record an event after all work that a stream has got so far.

        Raises:
            DeviceError: the driver refuses the stream, or the copy engine is closed.
        """
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
        return StreamEvent(self, event)

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
    """An engine's stream, and the blocks whose copies it shall wait for.

    Args:
        device: the device.
        stream: the driver's handle.
        blocks: device blocks.

    Attributes:
        done: set when the stream waits for all of them.
    """

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
