"""A sink that keeps what is announced, and the complete tokens of its blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors import Residency, Tier
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.types import split_hashes
from tests.support.tree_reader import TreeReader

from .record import Record


class Recorder(Sink):
    """held: hashes by tier. paths: the complete tokens of each block that was announced. After
    every task what is held must be a tree: see docs/flush.md."""

    def __init__(self, block_size: int, record: Record) -> None:
        tiers = ("device", "host", "storage")
        super().__init__(MemorySinkConfig(name="recorder", tiers=tiers), block_size)
        self.record = record
        self.reader = TreeReader()
        self.paths: dict[bytes, bytes] = {}

    @property
    def held(self) -> dict[Tier, set[bytes]]:
        """The announced blocks of each tier."""
        return {
            tier: {key for key, held in self.reader.held.items() if held & tier} for tier in Tier
        }

    async def begin_epoch(self, epoch: int) -> None:
        self.reader.clear()
        self.paths = {}

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        self.reader.take(tasks)
        for what in self.reader.violations:
            self.record.fail(what)
        self.reader.violations.clear()
        for task in tasks:
            keys, wide = split_hashes(task.hashes), 4 * self.block_size
            first = task.start_block_idx
            if len(keys) != task.count or len(task.tokens) != wide * (first + task.count):
                self.record.fail(f"a flush task of {task.count} blocks from {first} has others")
            for i, key in enumerate(keys if task.residency is Residency.RESIDENT else ()):
                path = task.tokens[: wide * (first + i + 1)]
                if self.paths.setdefault(key, path) != path:
                    self.record.fail("a block was announced with two different token paths")
