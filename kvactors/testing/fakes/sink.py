"""A sink that takes virtual time, hears things twice, and is out of reach for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.testing.fakes.gate import Latency, instant
from kvactors.testing.faults import FaultySink


class SimSink(FaultySink):
    """latency: seconds each call takes. twice: every delivery arrives twice. troubled: calls that met a misdeed. doubled: those that came twice."""

    def __init__(self, inner: Sink, latency: Latency = instant) -> None:
        super().__init__(inner)
        self.latency = latency
        self.twice = False
        self.troubled = self.doubled = 0

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """See `Sink.deliver`."""
        await self._before()
        await self.inner.deliver(tasks)
        if self.twice:
            self.doubled += 1
            await self.inner.deliver(tasks)
        self._after()

    async def _before(self) -> None:
        self.troubled += bool(self.misdeed)
        await asyncio.sleep(self.latency())
        await super()._before()

    def heal(self) -> None:
        """No more trouble."""
        self.misdeed = ""
        self.twice = False
