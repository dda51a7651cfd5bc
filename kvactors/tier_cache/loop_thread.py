"""A thread with an event loop, for storage and sinks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

import anyio

from kvactors.errors import KVActorsError, StoreError

CLOSING = 3.0
"""Seconds beyond its limit that `close` waits for the thread: a file store abandons threads that
hang after one second."""


class Service(Protocol):
    """Something that runs on the loop."""

    async def open(self) -> None:
        """Begin to work. Nothing is left open if it raises."""

    async def close(self, limit: float) -> None:
        """Let work in flight end, for `limit` seconds at most, and release everything."""


class LoopThread:
    """Runs services on an event loop in a separate thread.

    Args:
        services: opened in this order and closed in reverse.
    """

    def __init__(self, services: Sequence[Service]) -> None:
        self._services = tuple(services)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Future[float] | None = None

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def open(self, limit: float) -> None:
        """Start the thread and open the services.

        Raises:
            StoreError: they were not open after `limit` seconds.
            Exception: as a service raised it, if it is an error of this package.
        """
        opened: Future[None] = Future()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self.run(opened, limit)),
            name="kvactors-storage",
            daemon=True,
        )
        self._thread.start()
        try:
            opened.result(limit + CLOSING)
        except TimeoutError:
            raise StoreError(f"storage was not open after {limit} seconds") from None

    async def run(self, opened: Future[None], limit: float) -> None:
        """Open the services, and close them when `close` has been called. Runs in the thread."""
        loop = asyncio.get_running_loop()
        self._stop = loop.create_future()
        running: list[Service] = []
        try:
            with anyio.fail_after(limit):
                for service in self._services:
                    await service.open()
                    running.append(service)
        except BaseException as error:
            for service in reversed(running):
                await service.close(0.0)
            known = isinstance(error, KVActorsError)
            opened.set_exception(
                error if known else StoreError(f"storage does not open: {error!r}")
            )
            return
        self._loop = loop
        opened.set_result(None)
        left = await self._stop
        for service in reversed(running):
            until = loop.time() + left
            await service.close(left)
            left = max(0.0, until - loop.time())

    def call(self, work: Callable[..., object], *args: object) -> bool:
        """Run `work(*args)` on the loop. Returns False if there is none, or it has ended."""
        if self._loop is None:
            return False
        try:
            self._loop.call_soon_threadsafe(work, *args)
        except RuntimeError:
            return False
        return True

    def close(self, limit: float) -> None:
        """Close the services and end the thread, in about `limit` seconds. Any number of times."""
        thread = self._thread
        if thread is None:
            return
        self.call(self.stop, limit)
        thread.join(limit + CLOSING)

    def stop(self, limit: float) -> None:
        """Begin to close. Called on the loop."""
        if self._stop is not None and not self._stop.done():
            self._stop.set_result(limit)

    def abandon(self) -> None:
        """The process has forked: its child has no such thread."""
        self._thread, self._loop = None, None
