"""AttentionStore as storage: its SDK reads and writes device blocks, found by tokens."""

from __future__ import annotations

import asyncio
from concurrent.futures import CancelledError, Future
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.errors import CacheClosed
from kvactors.storage.backends.device_store import DeviceStore
from kvactors.tier_cache.loop_thread import LoopThread

log = get_logger()

MARGIN = 5.0
"""Seconds that a call may take beyond its limit: it ends itself before."""


class _StoreService:
    """A `DeviceStore` on the event loop of another thread. See `Service`."""

    def __init__(self, store: DeviceStore) -> None:
        self.store = store
        self._calls: set[asyncio.Task[int]] = set()

    async def open(self) -> None:
        await self.store.open()

    def begin(self, coroutine: Any, answer: Future[int]) -> None:
        task = asyncio.ensure_future(coroutine)
        self._calls.add(task)
        task.add_done_callback(lambda done: self._ended(done, answer))

    def _ended(self, task: asyncio.Task[int], answer: Future[int]) -> None:
        self._calls.discard(task)
        if task.cancelled():
            answer.cancel()
            answer.set_running_or_notify_cancel()
        elif error := task.exception():
            answer.set_exception(error)
        else:
            answer.set_result(task.result())

    async def close(self, limit: float) -> None:
        if self._calls:
            await asyncio.wait(self._calls, timeout=limit)
        for task in list(self._calls):
            task.cancel()
        await self.store.close()


class DirectStorage:
    """Reads and writes device blocks through a `DeviceStore`, from any thread.

    Args:
        store: not opened yet.
        timeout_s: seconds that a call may take.
    """

    def __init__(self, store: DeviceStore, timeout_s: float) -> None:
        self._service = _StoreService(store)
        self._thread = LoopThread([self._service])
        self._timeout_s = timeout_s

    def open(self, limit: float) -> None:
        """Connect.

        Raises:
            SdkError: the SDK is not installed, or does not work.
            StoreError: it is not ready after `limit` seconds.
        """
        self._thread.open(max(limit, self._service.store.ready_timeout))

    def fetch(self, tokens: bytes, start: int, blocks: list[int]) -> int:
        """Read blocks of a path into device blocks. See `DeviceStore.fetch`.

        Raises:
            TimeoutError: the call does not return. The blocks must not be used any more.
        """
        store = self._service.store
        return self._run(store.fetch(tokens, start, tuple(blocks), self._timeout_s))

    def save(self, tokens: bytes, start: int, blocks: list[int]) -> int:
        """Write blocks of a path that the store lacks. See `DeviceStore.save`.

        Raises:
            TimeoutError: the call does not return. The blocks must not be used any more.
        """
        store = self._service.store
        return self._run(store.save(tokens, start, tuple(blocks), self._timeout_s))

    def _run(self, coroutine: Any) -> int:
        answer: Future[int] = Future()
        if not self._thread.call(self._service.begin, coroutine, answer):
            coroutine.close()
            raise CacheClosed("AttentionStore is closed")
        try:
            return answer.result(self._timeout_s + MARGIN)
        except CancelledError:
            raise CacheClosed("AttentionStore is closed") from None

    def close(self, limit: float) -> None:
        """Let calls in flight end and disconnect, in about `limit` seconds."""
        self._thread.close(limit)
