"""AttentionStore's SDK in virtual time: its calls go to the stand-in, one after another, each after
a delay."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from kvactors.errors import SdkError
from kvactors.testing.faults import Fault, StoreFaults
from tests.support.attentionstore_sdk import services


class SimService(StoreFaults):
    """The SDK's service, which outlives its clients."""

    async def delay(self) -> None:
        """Wait as long as one call takes.

        Raises:
            SdkError: the service is down.
        """
        await super().delay()
        if self.down:
            raise SdkError("AttentionStore: the service is down")

    def damage(self, fault: Fault) -> None:
        """See `StoreFaults.damage`: object_lost."""
        if fault.kind != "object_lost":
            super().damage(fault)
        self.lose(fault.amount)

    def lose(self, count: int) -> int:
        """Remove the oldest paths behind the clients' back. Returns their number."""
        lost = 0
        for one in services.values():
            lost += one.lose(count - lost)
        self.vanished += lost
        return lost


class SimThread:
    """In place of the thread of an SDK (`kvactors.threads.Workers`): calls in order, never two at
    once, begun ones to their end.

    Each call is made before its delay and again after it: a device block that is used too early, or
    given away too early, holds or stores wrong bytes.
    """

    def __init__(self, service: SimService) -> None:
        self.service = service
        self._calls: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._task: asyncio.Task[None] | None = None

    @property
    def busy(self) -> int:
        """Calls submitted and not over."""
        return len(self._calls)

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Make a call when the earlier ones are over."""
        future: Future[Any] = Future()
        self._calls.append((call, future))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(
                self._work(), name="attention store"
            )
        return future

    async def _work(self) -> None:
        while self._calls:
            call, future = self._calls[0]
            if future.set_running_or_notify_cancel():
                await self._make(call, future)
            self._calls.popleft()

    async def _make(self, call: Callable[[], Any], future: Future[Any]) -> None:
        with suppress(SdkError):
            if not self.service.down:
                call()
        try:
            await self.service.delay()
            future.set_result(call())
        except SdkError as error:
            future.set_exception(error)

    def close(self) -> None:
        """No more calls."""
