"""AttentionStore as storage: its SDK reads and writes device blocks, found by tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.errors import CacheClosed, KVActorsError, StoreError
from kvactors.storage.backends.device_store import DeviceStore
from kvactors.tier_cache.loop_thread import LoopThread

log = get_logger()

MARGIN = 5.0
"""Seconds that a call may take beyond its limit: it ends itself before."""

SLICE = 0.01
"""Seconds of a wait between two looks at whether it is to end."""


class CallInFlight(TimeoutError):
    """A call has not returned in time.

    Attributes:
        answer: done when the call has ended. Until then it may access the device blocks.
    """

    def __init__(self, answer: Future[int]) -> None:
        super().__init__("a call of AttentionStore does not return")
        self.answer = answer


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
        self._late: list[Future[int]] = []

    @property
    def troubles(self) -> tuple[str, ...]:
        """Why nothing is read or written now, with reasons."""
        stuck = any(not answer.done() for answer in self._late)
        return ("a call of AttentionStore does not return",) if stuck else ()

    def open(self, limit: float) -> None:
        """Connect.

        Raises:
            SdkError: the SDK is not installed, or does not work.
            StoreError: it is not ready after `limit` seconds.
        """
        self._thread.open(max(limit, self._service.store.ready_timeout))

    def fetch(
        self, tokens: bytes, start: int, blocks: list[int], interrupted: Callable[[], bool]
    ) -> int:
        """Read blocks of a path into device blocks. See `DeviceStore.fetch`.

        Args:
            tokens: as there.
            start: as there.
            blocks: as there.
            interrupted: whether to wait no longer.

        Raises:
            CallInFlight: the call does not return. The blocks must not be used before it does. The
                next calls move nothing until then.
        """
        store = self._service.store
        return self._run(store.fetch(tokens, start, tuple(blocks), self._timeout_s), interrupted)

    def save(self, tokens: bytes, start: int, blocks: list[int]) -> int:
        """Write blocks of a path that the store lacks. See `DeviceStore.save`.

        Raises:
            CallInFlight: the call does not return. The blocks must not be used before it does. The
                next calls move nothing until then.
        """
        store = self._service.store
        return self._run(store.save(tokens, start, tuple(blocks), self._timeout_s), lambda: False)

    def _run(self, coroutine: Any, interrupted: Callable[[], bool]) -> int:
        if self.troubles:  # the next calls would wait for this one
            coroutine.close()
            return 0
        answer: Future[int] = Future()
        if not self._thread.call(self._service.begin, coroutine, answer):
            coroutine.close()
            raise CacheClosed("AttentionStore is closed")
        until = time.monotonic() + self._timeout_s + MARGIN
        while not wait([answer], SLICE).done:
            if time.monotonic() < until and not interrupted():
                continue
            self._late = [*(one for one in self._late if not one.done()), answer]
            raise CallInFlight(answer)
        try:
            return answer.result()
        except CancelledError:
            raise CacheClosed("AttentionStore is closed") from None
        except KVActorsError:
            raise
        except Exception as error:
            raise StoreError(f"AttentionStore: {error!r}") from error

    def close(self, limit: float) -> None:
        """Let calls in flight end and disconnect, in about `limit` seconds."""
        self._thread.close(limit)
