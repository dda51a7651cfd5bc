"""A sink that keeps what it was told: the mirror that tests and reports compare with the tiers. It can be told to misbehave."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import anyio

from kvactors.config import SinkConfig
from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.units import KEY_BYTES, Residency, Tier, split_keys

KEEP = 10_000
"""Tasks remembered."""


class MemorySink(Sink):
    """tasks: the last ones taken. counts: tasks by residency. failing: refuse every call. hang: seconds every call takes."""

    def __init__(self, config: SinkConfig, block_size: int) -> None:
        super().__init__(config, block_size)
        self.tasks: deque[FlushTask] = deque(maxlen=KEEP)
        self.counts: Counter[Residency] = Counter()
        self.epochs: list[int] = []
        self.failing = False
        self.fail_every = 0
        self.hang = 0.0
        self.calls = 0
        self._mirror: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}

    async def begin(self, epoch: int) -> None:
        """See `Sink.begin`."""
        await self._misbehave()
        self.epochs.append(epoch)
        self._mirror = {tier: set() for tier in Tier}

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """See `Sink.deliver`. SinkError for a task that is not well formed."""
        await self._misbehave()
        for task in tasks:
            self._validate(task)
        for task in tasks:
            held, keys = self._mirror[task.tier], split_keys(task.keys)
            (held.update if task.residency is Residency.RESIDENT else held.difference_update)(keys)
            self.tasks.append(task)
            self.counts[task.residency] += 1

    def view(self) -> dict[Tier, set[bytes]]:
        """What this sink believes: names by tier (a copy)."""
        return {tier: set(keys) for tier, keys in self._mirror.items()}

    def _validate(self, task: FlushTask) -> None:
        blocks = task.start_block_idx + task.count
        if task.count < 1 or len(task.keys) != KEY_BYTES * task.count or len(task.tokens) != 4 * self.block_size * blocks:
            raise SinkError(f"sink {self.name!r}: a task of {task.count} blocks from {task.start_block_idx} does not add up")
        if not self.epochs or task.epoch != self.epochs[-1]:
            raise SinkError(f"sink {self.name!r}: a task of epoch {task.epoch} outside of it")

    async def _misbehave(self) -> None:
        self.calls += 1
        if self.hang:
            await anyio.sleep(self.hang)
        if self.failing or (self.fail_every and self.calls % self.fail_every == 0):
            raise SinkError(f"sink {self.name!r} was told to fail")
