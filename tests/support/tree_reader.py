"""A strict reader of flush tasks, alone and behind a simulated sink."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.testing.fakes import SimSink
from kvactors.testing.faults import Latency, instant
from kvactors.types import Residency, Tier, split_hashes

KEPT = 20
"""Violations that are remembered."""


class TreeReader:
    """A strict reader of flush tasks, which notes every task that breaks the tree rule (see
    `flush_notifier.ledger`). held: set of tiers by block. violations: the first ones."""

    def __init__(self) -> None:
        self.held: dict[bytes, int] = {}
        self.violations: list[str] = []
        # of the blocks that are held, None at the beginning of a path
        self._parents: dict[bytes, bytes | None] = {}
        self._below: dict[bytes, set[bytes]] = {}  # blocks that are held, by parent

    def clear(self) -> None:
        """Nothing is held: a new epoch."""
        self.held.clear()
        self._parents.clear()
        self._below.clear()

    def take(self, tasks: Sequence[FlushTask]) -> None:
        """Tasks in order, each block by block: gains from the first block on, losses from the last
        block on."""
        for task in tasks:
            if not task.count:
                self.clear()
                continue
            hashes = split_hashes(task.hashes)
            pairs = list(
                zip(hashes, [task.parent if task.start_block_idx else None, *hashes], strict=False)
            )
            if task.residency is Residency.RESIDENT:
                for block_hash, parent in pairs:
                    self._gain(block_hash, parent, task)
            else:
                for block_hash, _ in reversed(pairs):
                    self._lose(block_hash, task)

    def _gain(self, block_hash: bytes, parent: bytes | None, task: FlushTask) -> None:
        above = 0 if parent is None else self.held.get(parent, 0)
        if parent is not None and not above:
            self._violated("is announced, and the block above it is nowhere", block_hash, task)
        elif parent is not None and task.tier is Tier.DEVICE and not above & Tier.DEVICE:
            self._violated(
                "is announced on DEVICE, and the block above it is not there", block_hash, task
            )
        self.held[block_hash] = self.held.get(block_hash, 0) | task.tier
        self._parents[block_hash] = parent
        if parent is not None:
            self._below.setdefault(parent, set()).add(block_hash)

    def _lose(self, block_hash: bytes, task: FlushTask) -> None:
        left = self.held.get(block_hash, 0) & ~int(task.tier)
        below = [self.held[one] for one in self._below.get(block_hash, ())]
        if below and not left:
            self._violated("is removed, and a block below it is not", block_hash, task)
        elif task.tier is Tier.DEVICE and any(tiers & Tier.DEVICE for tiers in below):
            self._violated("is removed from DEVICE, and a block below it is not", block_hash, task)
        if left:
            self.held[block_hash] = left
        elif block_hash in self.held:
            del self.held[block_hash]
            parent = self._parents.pop(block_hash)
            if parent is not None:
                self._below[parent].discard(block_hash)
                if not self._below[parent]:
                    del self._below[parent]

    def _violated(self, what: str, block_hash: bytes, task: FlushTask) -> None:
        if len(self.violations) < KEPT:
            place = f"block {task.start_block_idx} and {task.count - 1} more"
            self.violations.append(
                f"{block_hash[-4:].hex()} {what} ({task.residency.value} {task.tier.name} "
                f"{task.reason.value}, {place})"
            )


class ReadSink(SimSink):
    """A simulated sink with a reader of what the inner sink acknowledged."""

    def __init__(self, inner: Sink, latency: Latency = instant) -> None:
        super().__init__(inner, latency)
        self.reader = TreeReader()

    async def begin_epoch(self, epoch: int) -> None:
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
