"""Worker threads of low priority for blocking calls, and their end at the interpreter's exit."""

from __future__ import annotations

import asyncio
import atexit
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar
from weakref import WeakSet

import anyio

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.errors import as_exception
from kvactors.native import register_at_fork, work_in_background

P = ParamSpec("P")
T = TypeVar("T")

NICE = 10
"""Niceness of worker threads, so that they yield to the loop's thread.

At equal priority, with more runnable threads than cores, the loop's lag would grow tenfold.
"""


def lower_priority() -> None:
    """Lower the calling thread's priority, and let the loop run between its native pieces."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    work_in_background()


EXIT_LIMIT_S = 2.0
"""Seconds that the interpreter's exit waits for calls in flight, so that writes are complete.

A call that takes longer is abandoned. Its thread stops when it asks for the GIL (native/gil.hpp).
"""


_owners: WeakSet[Any] = WeakSet()
"""Owners of threads."""


def atexit_close(owner: Any) -> None:
    """Call `owner.end(seconds)` when the interpreter exits, from the main thread: it waits for the
    calls in flight, at most so long."""
    _owners.add(owner)


def _end_all() -> None:
    until = time.monotonic() + EXIT_LIMIT_S
    for owner in list(_owners):
        owner.end(max(0.0, until - time.monotonic()))


atexit.register(_end_all)
register_at_fork(after_in_child=_owners.clear)  # a child has none of the threads


class Workers:
    """A few daemon threads for blocking calls, started at the first call.

    A call that never returns does not keep the process from ending, as it would in an ordinary
    thread pool. With one thread, calls never overlap and keep their order.
    """

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self.name = name
        self._pending: set[Future[Any]] = set()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._started = 0
        atexit_close(self)

    def end(self, limit: float) -> None:
        """Wait for the running calls, at most `limit` seconds."""
        wait(list(self._pending), limit)

    def submit(self, call: Callable[[], T]) -> Future[T]:
        while self._started < self.threads:
            threading.Thread(
                target=self._work, name=f"{self.name}-{self._started}", daemon=True
            ).start()
            self._started += 1
        future: Future[T] = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._calls.put((call, future))
        return future

    async def run(self, call: Callable[[], T]) -> T:
        """Make a call, and wait for its end, even if cancelled: it may use memory of the caller."""
        return await wait_uncancelled(asyncio.wrap_future(self.submit(call)))

    @property
    def busy(self) -> int:
        return len(self._pending)

    def _work(self) -> None:
        lower_priority()
        while (item := self._calls.get()) is not None:
            call, future = item
            del item  # an idle thread keeps neither the call nor the memory that it works on
            if not future.set_running_or_notify_cancel():
                del call, future
                continue
            try:
                result = call()
            except BaseException as error:
                del call
                future.set_exception(as_exception(error))
            else:
                del call
                future.set_result(result)
                del result
            del future

    async def drained(self, limit: float) -> bool:
        """Wait until no call is in flight, at most `limit` seconds. Returns whether none is."""
        with anyio.move_on_after(limit):
            waiting = [asyncio.wrap_future(future) for future in list(self._pending)]
            await asyncio.gather(*waiting, return_exceptions=True)
        return not self.busy

    def afterwards(self, call: Callable[[], None]) -> None:
        """Run `call` once no call is in flight, in the thread that completes the last one."""
        for future in list(self._pending):
            future.add_done_callback(lambda _: None if self._pending else call())

    def close(self) -> None:
        for _ in range(self._started):
            self._calls.put(None)
        self._started = 0


async def in_thread(
    call: Callable[[], T], name: str, cancelled: Callable[[], None] | None = None
) -> T:
    """Run one blocking call in a separate daemon thread and wait for its end, even if cancelled."""
    future = asyncio.wrap_future(DaemonExecutor(name).submit(call))
    return await wait_uncancelled(future, cancelled)


class DaemonExecutor(Executor):
    """Executor for aiofiles that runs each call in a separate daemon thread.

    A cancellation ends only the wait, so the calls must not access memory of the caller. With
    asyncio's default executor, a call that does not return would keep `asyncio.run` and the process
    from ending.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        workers = Workers(1, self.name)
        future = workers.submit(partial(fn, *args, **kwargs))
        workers.close()
        return future
