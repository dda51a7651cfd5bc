"""A sink with virtual latency, duplicate deliveries and outages, whose tasks a strict reader
checks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.testing.faults import FaultySink
from kvactors.testing.gate import Latency, instant
from kvactors.testing.tree_reader import TreeReader


class SimSink(FaultySink):
    """A sink with a latency.

    Attributes:
        latency: seconds each call takes.
        reader: of what the inner sink acknowledged.
    """

    def __init__(self, inner: Sink, latency: Latency = instant) -> None:
        super().__init__(inner)
        self.latency = latency
        self.reader = TreeReader()

    async def begin_epoch(self, epoch: int) -> None:
        """See `Sink.begin_epoch`."""
        await self._before()
        await self.inner.begin_epoch(epoch)
        self.reader.clear()
        self._after()

    async def _pass_on(self, tasks: Sequence[FlushTask]) -> None:
        taken = 0
        try:
            await self.inner.deliver(tasks)
            taken = len(tasks)
        finally:
            self.reader.take(tasks[: max(taken, self.inner.num_acknowledged)])

    async def _before(self) -> None:
        await asyncio.sleep(self.latency())
        await super()._before()
