"""Shared by a cache and its leases: checks of the calling loop and thread, deadlines, and the
channel to PrefixIndex."""

from __future__ import annotations

import asyncio
import threading
from _thread import get_ident
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

from kvactors.actor import ActorRef, Ask
from kvactors.actor.clock import clock_of
from kvactors.actor.log import get_logger
from kvactors.checks import check_seconds
from kvactors.device.events import (
    Completion,
    DeviceEvents,
    Pass,
    Stream,
    StreamEvent,
    stream_handle,
)
from kvactors.errors import (
    ActorFailed,
    CacheClosed,
    DeadlineExceeded,
    DeviceError,
    KVActorsError,
    WrongLoop,
)
from kvactors.prefix_index.messages import Abandon, IndexRequest, Withdrawn
from kvactors.prefix_index.work import turn_blocks_of
from kvactors.system import System

log = get_logger()


class _NoRunner:
    """In place of a loop that does not name the thread that runs it, and of that of a closed cache:
    `check` looks at each call."""

    _thread_id = None


class CallContext:
    """Loop-side state of an open cache: checks the calling loop and thread, and asks the index.
    on_forgotten: called with each lease that is garbage-collected before its end, for tests."""

    def __init__(self, system: System) -> None:
        block_size = system.block_size
        self.system = system
        self.index: ActorRef[IndexRequest] = system.index
        self.loop = asyncio.get_running_loop()
        self.layers = system.layout.num_layers + system.layout.extra_layers
        self.block_size = block_size
        self.part_tokens = turn_blocks_of(block_size) * block_size
        self.events = DeviceEvents(self.loop)
        self.lease_numbers = count(1)
        self.on_forgotten: Callable[[int], None] | None = None
        self._giving_back: set[asyncio.Task[None]] = set()
        self._supervisor = system.supervisor
        self._thread = threading.get_ident()
        self._default_deadline = system.config.cache.default_deadline_s
        self._clock = clock_of(self.loop)
        self._runner: Any = self.loop if hasattr(self.loop, "_thread_id") else _NoRunner

    def close(self) -> None:
        self.system.is_open, self._runner = False, _NoRunner

    def check(self) -> None:
        """WrongLoop outside the cache's own event loop, CacheClosed once it is closed or in a
        forked process, CacheFailed if it has failed."""
        self.check_loop()
        if not self.system.is_open:
            raise CacheClosed("the cache is closed")
        if self._supervisor.failed is not None:
            self.system.check_usable()

    def check_loop(self) -> None:
        """WrongLoop outside the cache's own event loop, CacheClosed in a forked process."""
        if self.system.forked:
            self.system.check_usable()
        with suppress(RuntimeError):  # no loop runs
            if asyncio.get_running_loop() is self.loop:
                return
        raise WrongLoop(
            "this cache belongs to another asyncio event loop: use cache.from_thread in other "
            "threads"
        )

    def check_thread(self) -> None:
        """WrongLoop in a thread that is not the loop's, CacheClosed in a forked process."""
        if self.system.forked:
            self.system.check_usable()
        if threading.get_ident() != self._thread:
            raise WrongLoop(
                "this cache belongs to the thread of its event loop: use cache.from_thread in "
                "other threads"
            )

    def begin_call(self, deadline: float | None) -> float:
        """The absolute deadline of a call, once `check` has passed. deadline: seconds, those of the
        settings if None."""
        if (
            self.system.forked
            or self._runner._thread_id != get_ident()  # the shortest test, see `check_loop`
            or self._supervisor.failed is not None
        ):
            self.check()
        clock = self._clock  # a local variable: faster than the call of an attribute
        if deadline is None:
            return clock() + self._default_deadline
        return clock() + check_seconds("deadline", deadline)

    def check_call(self) -> None:
        if (
            self.system.forked
            or self._runner._thread_id != get_ident()
            or self._supervisor.failed is not None
        ):
            self.check()

    async def ask(self, message: Ask[Any], at: float) -> Any:
        """Ask PrefixIndex in the same step as the call of `begin_call`. at: its result."""
        try:
            return await self.index.ask(message, deadline=at)
        except ActorFailed as error:
            self.raise_if_closed(error)
            raise

    async def wait_device(self, event: Completion | None, stream: Stream | None, at: float) -> None:
        """Wait until the device has completed an event, or the work that a stream has got when the
        call begins. Neither is given: return at once. at: the absolute deadline."""
        if event is None and stream is None:
            return
        given = self._event(event, stream)
        try:
            await self.events.wait(given, at)
        except DeviceError:
            self.check()  # the event of a cache that was closed
            raise
        finally:
            if isinstance(given, StreamEvent):
                given.release()
        self.check()

    def record_pass(
        self, leases: frozenset[int], event: Completion | None, stream: Stream | None
    ) -> Pass:
        """The device uses the blocks of these leases until an event completes, or has completed the
        work that a stream has got so far."""
        return self.events.record_pass(leases, self._event(event, stream))

    def _event(self, event: Completion | None, stream: Stream | None) -> Completion:
        if stream is None:
            if event is None:
                raise ValueError("neither event nor stream is given")
            return event
        if event is not None:
            raise ValueError("event and stream are given: give one of them")
        return self.system.plane.streams.record_event(stream_handle(stream))

    def raise_if_closed(self, error: ActorFailed) -> None:
        """CacheClosed if an ask has failed because the cache was closed."""
        if not self.system.is_open and error.__cause__ is None:
            raise CacheClosed("the cache was closed during this call") from None

    def tell(self, message: Abandon | Withdrawn) -> None:
        """Send PrefixIndex a control message, from the loop's thread."""
        if self.system.is_open and not self.loop.is_closed():
            try:
                self.index.try_tell(message)
            except KVActorsError:
                return  # the cache is closing or has failed: no actor is left to release the lease

    def _leaked(self, lease: int) -> None:
        self.system.leaked_leases += 1
        log.warning("lease leaked", lease=lease)
        self._give_back(lease)

    def abandon(self, lease: int) -> None:
        """Give a lease back, from any thread. Its blocks stay in use until the passes that use them
        are over."""
        if threading.get_ident() == self._thread:
            self._give_back(lease)
        else:
            self._call_on_loop(self._give_back, lease)

    def _give_back(self, lease: int) -> None:
        if not (self.system.is_open and self.events.passes_of(lease)):
            self.tell(Abandon(lease))
            return
        self.system.in_flight.begin()
        task = self.loop.create_task(self._give_back_later(lease))
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)

    async def _give_back_later(self, lease: int) -> None:
        try:
            while self.events.passes_of(lease):
                try:
                    await self.events.wait_passes(lease, self._clock() + self._default_deadline)
                except DeadlineExceeded:
                    log.warning("forward pass overdue", lease=lease)
            self.tell(Abandon(lease))
        finally:
            self.system.in_flight.end()

    def stop(self) -> None:
        for task in self._giving_back:
            task.cancel()

    def abandon_unused(self, lease: int) -> bool:
        """Give a lease back from a finaliser, which may run in any thread and at any point; False
        if the cache is closed."""
        if self.on_forgotten is not None:
            self.on_forgotten(lease)
        return self._call_on_loop(self._leaked, lease)

    def _call_on_loop(self, call: Callable[[int], None], lease: int) -> bool:
        if not self.system.is_open or self.loop.is_closed() or self.system.forked:
            return False
        try:
            self.loop.call_soon_threadsafe(call, lease)
        except RuntimeError:  # the loop was closed by its own thread since
            return False
        return True
