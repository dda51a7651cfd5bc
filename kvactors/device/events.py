"""Completion of asynchronous device work: events of a GPU's streams, and awaitables."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Generator
from contextlib import suppress
from math import inf
from typing import Any, Protocol, TypeAlias

import anyio

from kvactors.actor.uncancelled import retrieve
from kvactors.checks import check_int, kind
from kvactors.errors import DeadlineExceeded, DeviceError, as_exception

POLL_S = 0.0005  # seconds between two questions whether events have completed


class DeviceEvent(Protocol):
    """An event recorded on a GPU's stream, as PyTorch, Paddle and other frameworks have it."""

    def query(self) -> bool:
        """Whether all work before the event has completed. Raises if it has failed."""


class RecordedEvents(Protocol):
    """Events on an engine's streams, which the data plane has recorded."""

    def query(self, event: int) -> bool:
        """Whether all work before an event has completed. DeviceError."""

    def give_back(self, event: int) -> None:
        """No waiter needs an event any more."""


Completion: TypeAlias = DeviceEvent | Awaitable[object]
"""Completes when asynchronous device work has."""


class StreamObject(Protocol):
    """A stream of a framework, as PyTorch and Paddle have it."""

    @property
    def cuda_stream(self) -> int:
        """The driver's handle."""


Stream: TypeAlias = StreamObject | int
"""An engine's CUDA stream: the driver's handle, or an object that has it."""


def stream_handle(stream: Stream) -> int:
    """The driver's handle of a stream. TypeError for what is no stream."""
    if isinstance(stream, int):
        return check_int("stream", stream)
    return check_int("stream.cuda_stream", getattr(stream, "cuda_stream", None))


class StreamEvent:
    """An event recorded on a stream, which is released once it has completed or failed."""

    def __init__(self, events: RecordedEvents, event: int) -> None:
        self._events = events
        self._event: int | None = event

    def query(self) -> bool:
        if self._event is None:
            return True
        completed = True
        try:
            completed = self._events.query(self._event)
        finally:
            if completed:
                self.release()
        return completed

    def release(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            self._events.give_back(event)


class Pass:
    """A forward pass that the device computes. Await it for its end and the result of its
    awaitable: a wait that is cancelled leaves the awaitable as it is.
    """

    def __init__(
        self, leases: frozenset[int], event: DeviceEvent | asyncio.Future[Any], events: DeviceEvents
    ) -> None:
        self.leases = leases
        self.event = event
        self._events = events

    def __await__(self) -> Generator[Any, None, Any]:
        if isinstance(self.event, asyncio.Future):
            return asyncio.shield(self.event).__await__()
        return self._events.wait(self.event, inf).__await__()

    def is_over(self) -> bool:
        if isinstance(self.event, asyncio.Future):
            return self.event.done()
        try:
            return _query(self.event)
        except DeviceError:
            return True


class DeviceEvents:
    """The events that calls of one cache wait for. While there are any, one timer of the loop
    queries them, each once for all its waiters: no call blocks the loop or a thread.

    Attributes:
        passes: recorded passes, in the order of their records. Some of them may be over.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.passes: list[Pass] = []
        self._loop = loop
        self._waiting: dict[int, tuple[DeviceEvent, list[asyncio.Future[None]]]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, event: Completion | None, at: float) -> None:
        """Return when an event has completed.

        Raises:
            DeviceError: it has failed, or the awaitable was cancelled.
            DeadlineExceeded: it has not completed in time.
        """
        if callable(getattr(event, "query", None)):
            completed = await self._wait_event(event, at)  # type: ignore[arg-type]
        elif inspect.isawaitable(event):
            completed = await self._wait_awaitable(event, at)
        else:
            raise _not_an_event(event)
        if not completed:
            raise DeadlineExceeded("the device event has not completed in time")

    def record_pass(self, leases: frozenset[int], event: Completion) -> Pass:
        """The device uses the blocks of these leases until an event completes."""
        if not callable(getattr(event, "query", None)):
            if not inspect.isawaitable(event):
                raise _not_an_event(event)
            event = asyncio.ensure_future(event, loop=self._loop)
        begun = Pass(leases, event, self)  # type: ignore[arg-type]
        self.passes = [*(one for one in self.passes if not one.is_over()), begun]
        return begun

    def passes_of(self, lease: int) -> list[Pass]:
        return [one for one in self.passes if lease in one.leases and not one.is_over()]

    async def wait_passes(self, lease: int, at: float) -> None:
        """Return when no pass uses the blocks of a lease. A pass that fails is over."""
        for one in self.passes_of(lease):
            with suppress(DeviceError):
                await self.wait(one.event, at)

    async def _wait_event(self, event: DeviceEvent, at: float) -> bool:
        if _query(event):
            return True
        waiter: asyncio.Future[None] = self._loop.create_future()
        _, waiters = self._waiting.setdefault(id(event), (event, []))
        waiters.append(waiter)
        self._start()
        try:
            with anyio.CancelScope(deadline=at):
                await waiter
        finally:
            if not waiter.done() or waiter.cancelled():
                self._forget(event, waiter)
        return waiter.done() and not waiter.cancelled() and waiter.result() is None

    async def _wait_awaitable(self, awaitable: Awaitable[Any], at: float) -> bool:
        task = asyncio.ensure_future(awaitable, loop=self._loop)
        if task is not awaitable:
            task.add_done_callback(retrieve)
        try:
            with anyio.CancelScope(deadline=at):
                await asyncio.wait([task])
        finally:
            if not task.done() and task is not awaitable:
                task.cancel()
        if not task.done():
            return False
        if task.cancelled():
            raise DeviceError("the awaitable given as event was cancelled")
        if (error := task.exception()) is not None:
            raise _failed(error)
        return True

    def _start(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        self._timer = None
        for number, (event, waiters) in list(self._waiting.items()):
            failure = None
            try:
                if not _query(event):
                    continue
            except DeviceError as error:
                failure = error
            del self._waiting[number]
            for waiter in waiters:
                if waiter.done():
                    continue
                if failure is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(_failed(failure.__cause__ or failure))
        if self._waiting:
            self._start()

    def _forget(self, event: DeviceEvent, waiter: asyncio.Future[None]) -> None:
        _, waiters = self._waiting.get(id(event), (event, []))
        if waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self._waiting[id(event)]


def _query(event: DeviceEvent) -> bool:
    try:
        return bool(event.query())
    except BaseException as error:  # a framework's own errors
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise _failed(error) from as_exception(error)


def _not_an_event(given: object) -> TypeError:
    return TypeError(f"event must have query() or be awaitable, not {kind(given)}")


def _failed(error: BaseException) -> DeviceError:
    failure = DeviceError(f"the device event has failed: {as_exception(error)!r}")
    failure.__cause__ = as_exception(error)
    return failure
