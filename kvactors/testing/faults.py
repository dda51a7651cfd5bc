"""Parts that misbehave on command, around real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import anyio

from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Holdings, Sink

Misdeed = Literal["", "down", "hang", "fail_every", "lose_answers"]


class FaultySink(Sink):
    """A sink around another. misdeed: down (refuses every call), hang (never answers), fail_every (refuses every n-th call), lose_answers
    (does what it is told and then fails), or nothing. calls: how many there were."""

    def __init__(self, inner: Sink) -> None:
        self.inner = inner
        self.name = inner.name
        self.block_size = inner.block_size
        self.view_of = inner.view_of
        self.takes_clear = inner.takes_clear
        self.by_name = inner.by_name
        self.misdeed: Misdeed = ""
        self.every = 2
        self.calls = 0

    @property
    def view(self) -> Any:
        """The inner sink's, if it has one."""
        return getattr(self.inner, "view", None)

    @property
    def taken(self) -> int:
        """The inner sink's; nothing of an answer that is lost."""
        return 0 if self.misdeed else self.inner.taken

    @taken.setter
    def taken(self, count: int) -> None:
        self.inner.taken = count

    async def open(self) -> None:
        """See `Sink.open`."""
        await self.inner.open()

    def attach(self, holdings: Holdings) -> None:
        """See `Sink.attach`."""
        self.inner.attach(holdings)

    async def begin(self, epoch: int) -> None:
        """See `Sink.begin`."""
        await self._before()
        await self.inner.begin(epoch)
        self._after()

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """See `Sink.deliver`."""
        await self._before()
        await self.inner.deliver(tasks)
        self._after()

    async def close(self) -> None:
        """See `Sink.close`."""
        await self.inner.close()

    async def _before(self) -> None:
        self.calls += 1
        if self.misdeed == "hang":
            await anyio.sleep_forever()
        if self.misdeed == "down" or (self.misdeed == "fail_every" and self.calls % self.every == 0):
            raise SinkError(f"sink {self.name!r} was told to fail")

    def _after(self) -> None:
        if self.misdeed == "lose_answers":
            raise SinkError(f"sink {self.name!r} was told to lose its answer")
