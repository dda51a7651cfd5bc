"""A sink that takes virtual time, takes things twice, is out of reach for a while, and is read
strictly."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.testing.fakes.gate import Latency, instant
from kvactors.testing.faults import FaultMode, FaultySink
from kvactors.testing.plan import Fault, Kind
from kvactors.testing.tree_reader import TreeReader

FAULT_MODES: dict[Kind, FaultMode] = {
    "sink_down": "down",
    "sink_hang": "hang",
    "sink_lose_answers": "lose_answers",
}


class SimSink(FaultySink):
    """latency: seconds each call takes. twice: every delivery arrives twice. troubled: calls that
    met a fault_mode. doubled: those that came twice. reader: of what the inner sink took."""

    def __init__(self, inner: Sink, latency: Latency = instant) -> None:
        super().__init__(inner)
        self.latency = latency
        self.twice = False
        self.troubled = self.doubled = 0
        self.reader = TreeReader()

    async def begin_epoch(self, epoch: int) -> None:
        """See `Sink.begin_epoch`."""
        await self._before()
        await self.inner.begin_epoch(epoch)
        self.reader.clear()
        self._after()

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """See `Sink.deliver`."""
        await self._before()
        await self._pass_on(tasks)
        if self.twice:
            self.doubled += 1
            await self._pass_on(tasks)
        self._after()

    async def _pass_on(self, tasks: Sequence[FlushTask]) -> None:
        taken = 0
        try:
            await self.inner.deliver(tasks)
            taken = len(tasks)
        finally:
            self.reader.take(tasks[: max(taken, self.inner.num_acknowledged)])

    async def _before(self) -> None:
        self.troubled += bool(self.fault_mode)
        await asyncio.sleep(self.latency())
        await super()._before()

    async def inject(self, fault: Fault) -> None:
        """See `Injectable`: sink_down, sink_hang, sink_lose_answers, sink_duplicate."""
        if fault.kind == "sink_duplicate":
            self.twice = True
        else:
            self.fault_mode = FAULT_MODES[fault.kind]

    async def recover(self, fault: Fault) -> None:
        """See `Injectable`."""
        self.heal()

    def heal(self) -> None:
        """End every fault."""
        self.fault_mode = ""
        self.twice = False
