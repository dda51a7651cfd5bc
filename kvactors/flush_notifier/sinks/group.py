"""The sink of a group of layers: the tasks of its notifier go to the sink of the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import FlushTask, GroupLabel
from kvactors.flush_notifier.sinks.base import Sink, SnapshotSource, in_turn
from kvactors.types import HASH_BYTES, Reason, Residency, Tier, split_hashes


class GroupSink(Sink):
    """Translates the items of a group (`kvactors.groups.item_words`) to the blocks of prompts that
    they belong to. A removal has no words: the names of items are kept while a tier has them.

    Args:
        sink: of the cache. It takes groups.
        group: the group.
        block_size: tokens of a block of a prompt.
    """

    by_name = repeats = True

    def __init__(self, sink: Sink, group: GroupLabel, block_size: int) -> None:
        super().__init__(sink.name, block_size)
        self.sink, self.group = sink, group
        self.filter, self.resync_interval = sink.filter, sink.resync_interval
        self._held: dict[bytes, tuple[bytes, int]] = {}  # by item: hash of the block, tiers

    def set_snapshot_source(self, source: SnapshotSource) -> None:
        """See `Sink.set_snapshot_source`."""

        def blocks() -> Iterator[HeldBlock]:
            for held in source():
                hashes, tokens = self._blocks_of(held.tokens, 1)
                yield held._replace(hash=hashes, parent=b"", tokens=tokens, group=self.group)

        self.sink.set_group_source(self.group, blocks)

    async def begin_epoch(self, epoch: int) -> None:
        """See `Sink.begin_epoch`: the sink keeps the blocks of others."""
        tasks = []
        for tier in Tier:
            hashes = b"".join(name for name, tiers in self._held.values() if tiers & tier)
            if hashes:
                count, gone = len(hashes) // HASH_BYTES, Residency.GONE
                task = (b"", 0, count, hashes, b"", gone, tier, Reason.RESTART, epoch)
                tasks.append(FlushTask(*task, group=self.group))
        self._held.clear()
        if tasks:
            await in_turn(self.sink, lambda: self.sink.deliver(tasks))

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """See `Sink.deliver`."""
        found = [self._translated(task) for task in tasks]
        sent = [at for at, task in enumerate(found) if task.count]
        done = 0

        async def work() -> None:
            nonlocal done
            try:
                await self.sink.deliver([found[at] for at in sent])
                done = len(sent)
            except BaseException:
                done = self.sink.num_acknowledged
                raise

        try:
            if sent:
                await in_turn(self.sink, work)
        finally:
            self.num_acknowledged = sent[done] if done < len(sent) else len(tasks)
            for task in tasks[: self.num_acknowledged]:
                if task.residency is Residency.GONE:
                    self._forget(task)

    def _translated(self, task: FlushTask) -> FlushTask:
        items, bit, tokens = split_hashes(task.hashes), int(task.tier), b""
        if task.residency is Residency.RESIDENT:
            hashes, tokens = self._blocks_of(task.tokens, task.count)
            for item, name in zip(items, split_hashes(hashes), strict=True):
                self._held[item] = name, self._held.get(item, (name, 0))[1] | bit
        else:
            hashes = b"".join(self._held[item][0] for item in items if item in self._held)
        return msgspec.structs.replace(
            task,
            tokens=tokens,
            start_block_idx=0,
            count=len(hashes) // HASH_BYTES,
            hashes=hashes,
            parent=b"",
            group=self.group,
        )

    def _forget(self, task: FlushTask) -> None:
        for item in split_hashes(task.hashes):
            name, tiers = self._held.pop(item, (b"", 0))
            if tiers := tiers & ~int(task.tier):
                self._held[item] = name, tiers

    def _blocks_of(self, words: bytes, count: int) -> tuple[bytes, bytes]:
        """Hashes and tokens of the blocks of `count` items."""
        rows = np.frombuffer(words, np.uint32).reshape(count, -1)
        names, tokens = rows[:, -(HASH_BYTES // 4) :], rows[:, 1 : 1 + self.block_size]
        return names.tobytes(), tokens.tobytes()
