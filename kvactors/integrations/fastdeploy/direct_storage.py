"""AttentionStore as storage: its SDK reads and writes device blocks, found by tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
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

Move = Callable[[DeviceStore], Coroutine[Any, Any, int]]
"""A call of the store of one rank. Returns the blocks that it has moved."""


class CallInFlight(TimeoutError):
    """A call has not returned in time.

    Attributes:
        answer: done when the call has ended. Until then it may access the device blocks.
    """

    def __init__(self, answer: Future[int]) -> None:
        super().__init__("a call of AttentionStore does not return")
        self.answer = answer


class _StoreService:
    """The `DeviceStore` of each rank, on the event loop of another thread. See `Service`."""

    def __init__(self, stores: Sequence[DeviceStore]) -> None:
        self.stores = stores
        self._calls: set[asyncio.Task[int]] = set()

    async def open(self) -> None:
        try:
            for store in self.stores:
                await store.open()
        except BaseException:
            await self.close(0.0)
            raise

    def begin(self, move: Move, answer: Future[int]) -> None:
        task = asyncio.ensure_future(self._move(move))
        self._calls.add(task)
        task.add_done_callback(lambda done: self._ended(done, answer))

    async def _move(self, move: Move) -> int:
        """The blocks that every rank has moved, when the calls of all have ended."""
        moved = await asyncio.gather(*map(move, self.stores), return_exceptions=True)
        for one in moved:
            if isinstance(one, BaseException):
                raise one
        return min(one for one in moved if isinstance(one, int))

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
        for store in self.stores:
            await store.close()


class DirectStorage:
    """Reads and writes device blocks through the `DeviceStore` of each rank, from any thread. A
    block counts as moved when every rank has moved its part of it.

    Args:
        stores: by rank, not opened yet.
        timeout_s: seconds that a call may take.
    """

    def __init__(self, stores: Sequence[DeviceStore], timeout_s: float) -> None:
        self._service = _StoreService(stores)
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
        self._thread.open(max(limit, sum(store.ready_timeout for store in self._service.stores)))

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
        seconds = self._timeout_s
        return self._run(
            lambda store: store.fetch(tokens, start, tuple(blocks), seconds), interrupted
        )

    def save(self, tokens: bytes, start: int, blocks: list[int]) -> int:
        """Write blocks of a path that the store lacks. See `DeviceStore.save`.

        Raises:
            CallInFlight: the call does not return. The blocks must not be used before it does. The
                next calls move nothing until then.
        """
        seconds = self._timeout_s
        return self._run(
            lambda store: store.save(tokens, start, tuple(blocks), seconds), lambda: False
        )

    def _run(self, move: Move, interrupted: Callable[[], bool]) -> int:
        if self.troubles:  # the next calls would wait for this one
            return 0
        answer: Future[int] = Future()
        if not self._thread.call(self._service.begin, move, answer):
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
