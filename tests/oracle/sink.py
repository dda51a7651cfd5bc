"""A sink that keeps what it is given, and finds contradictions in it."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors import Residency, Tier
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.sink_config import MemorySinkConfig

from .record import Record


class Recorder(Sink):
    """held: hashes by tier. paths: the complete tokens of each block that is held."""

    def __init__(self, block_size: int, record: Record) -> None:
        super().__init__(MemorySinkConfig(name="recorder", tiers=("device", "host", "storage")), block_size)
        self.record = record
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.paths: dict[bytes, bytes] = {}

    async def begin(self, epoch: int) -> None:
        self.held = {tier: set() for tier in Tier}
        self.paths = {}

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        for task in tasks:
            self._take(task)

    def _take(self, task: FlushTask) -> None:
        keys = [task.keys[i : i + 32] for i in range(0, len(task.keys), 32)]
        held, wide = self.held[task.tier], 4 * self.block_size
        if len(keys) != task.count or len(task.tokens) != wide * (task.start_block_idx + task.count):
            self.record.fail(f"a flush task of {task.count} blocks from {task.start_block_idx} does not add up")
        if task.residency is Residency.RESIDENT:
            held.update(keys)
            for i, key in enumerate(keys):
                path = task.tokens[: wide * (task.start_block_idx + i + 1)]
                if self.paths.setdefault(key, path) != path:
                    self.record.fail("a block was announced with two different token paths")
            return
        held.difference_update(keys)
        for key in keys:
            if not any(key in others for others in self.held.values()):
                self.paths.pop(key, None)
