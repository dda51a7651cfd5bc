"""A sink that keeps its tasks and finds contradictions in them."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors import Residency, Tier
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.settings.sinks import MemorySinkConfig

from .record import Record


class Recorder(Sink):
    """held: hashes by tier. paths: the complete tokens of each block that is held. After every task
    what is held must be a tree: see docs/flush.md."""

    def __init__(self, block_size: int, record: Record) -> None:
        super().__init__(
            MemorySinkConfig(name="recorder", tiers=("device", "host", "storage")), block_size
        )
        self.record = record
        self.held: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self.paths: dict[bytes, bytes] = {}
        self._below: dict[bytes, set[bytes]] = {}

    async def begin_epoch(self, epoch: int) -> None:
        self.held = {tier: set() for tier in Tier}
        self.paths = {}
        self._below = {}

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        for task in tasks:
            self._take(task)

    def _take(self, task: FlushTask) -> None:
        keys = [task.hashes[i : i + 32] for i in range(0, len(task.hashes), 32)]
        held, wide = self.held[task.tier], 4 * self.block_size
        if len(keys) != task.count or len(task.tokens) != wide * (
            task.start_block_idx + task.count
        ):
            self.record.fail(
                f"a flush task of {task.count} blocks from {task.start_block_idx} does not add up"
            )
        if task.residency is Residency.RESIDENT:
            for above, key in zip([task.parent, *keys], keys, strict=False):
                self._below.setdefault(above, set()).add(key)
            if task.start_block_idx and not self._announced(task.parent):
                self.record.fail(
                    f"{task.tier.name}: a block was announced without the one above it "
                    f"({task.reason.value})"
                )
            if task.start_block_idx and task.tier is Tier.DEVICE and task.parent not in held:
                self.record.fail(
                    "a block was announced on the device without the one above it "
                    f"({task.reason.value})"
                )
            held.update(keys)
            for i, key in enumerate(keys):
                path = task.tokens[: wide * (task.start_block_idx + i + 1)]
                if self.paths.setdefault(key, path) != path:
                    self.record.fail("a block was announced with two different token paths")
            return
        held.difference_update(keys)
        for key in keys:
            below = self._below.get(key, set())
            if task.tier is Tier.DEVICE and not below.isdisjoint(held):
                self.record.fail(
                    f"a block was removed from the device before one below it ({task.reason.value})"
                )
            if not self._announced(key):
                self.paths.pop(key, None)
                if any(map(self._announced, below)):
                    self.record.fail(
                        f"{task.tier.name}: a block was removed before one below it "
                        f"({task.reason.value})"
                    )
                self._below.pop(key, None)

    def _announced(self, key: bytes) -> bool:
        return any(key in held for held in self.held.values())
