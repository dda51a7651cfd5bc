"""Threads that work for the loop, not against it."""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import anyio

T = TypeVar("T")

NICE = 10
"""Worker threads yield to the loop's: with more runnable threads than cores its lag would grow tenfold otherwise."""


def lower_priority() -> None:
    """Make the calling thread yield; on a system without thread priorities it works at the common one."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Workers:
    """A few threads for calls that block, started at the first one. They are daemons: a call that never returns does not keep the
    process from ending, which an ordinary thread pool would. With one thread, calls never overlap and keep their order."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self.name = name
        self._pending: set[Future[Any]] = set()
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._started = 0

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run a call when a thread is free."""
        while self._started < self.threads:
            threading.Thread(target=self._work, name=f"{self.name}-{self._started}", daemon=True).start()
            self._started += 1
        future: Future[T] = Future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        self._calls.put((call, future))
        return future

    @property
    def busy(self) -> int:
        """Calls submitted and not over."""
        return len(self._pending)

    def _work(self) -> None:
        lower_priority()
        while (item := self._calls.get()) is not None:
            call, future = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    async def drained(self, limit: float) -> bool:
        """Wait until no call is under way, for at most `limit` seconds; whether that came about."""
        with anyio.move_on_after(limit):
            waiting = [asyncio.wrap_future(future) for future in list(self._pending)]
            await asyncio.gather(*waiting, return_exceptions=True)
        return not self.busy

    def close(self) -> None:
        """Let the threads end when they are done."""
        for _ in range(self._started):
            self._calls.put(None)
        self._started = 0
