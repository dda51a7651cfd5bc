"""A sink that keeps what it is sent in memory: the view that tests and reports compare with the
tiers. It can be set to fail."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from kvactors.errors import SinkError
from kvactors.flush_notifier.blocks import HeldBlock
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.types import HASH_BYTES, Residency, Tier, split_hashes

KEPT_TASKS = 10_000


class MemorySink(Sink):
    """Checks every task against the earlier ones, and applies it."""

    takes_groups = True

    def __init__(self, config: MemorySinkConfig, block_size: int) -> None:
        super().__init__(config, block_size)
        self.groups: dict[str, dict[Tier, set[bytes]]] = {}  # block hashes by name and tier
        self.tasks: deque[FlushTask] = deque(maxlen=KEPT_TASKS)
        self.counts: Counter[Residency] = Counter()
        self.epochs: list[int] = []
        self.calls = 0
        self.live_view: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self._blocks: dict[bytes, HeldBlock] = {}  # of the blocks that are held

    async def begin_epoch(self, epoch: int) -> None:
        self.calls += 1
        self.epochs.append(epoch)
        self.lose_state()

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        self.calls += 1
        if tasks[0].group is not None:
            self._apply_groups(tasks)
            return
        for task in tasks:
            self._validate(task)
        for task in tasks:
            self._apply(task)

    def lose_state(self) -> None:
        """Hold nothing, as an index that was restarted without its senders noticing."""
        for hashes in self.live_view.values():
            hashes.clear()
        self._blocks = {}
        self.groups = {}

    def _apply_groups(self, tasks: Sequence[FlushTask]) -> None:
        """Tasks of a group of layers, whose blocks do not depend on others."""
        for task in tasks:
            assert task.group is not None
            size = 4 * self.block_size * task.count * (task.residency is Residency.RESIDENT)
            if len(task.hashes) != HASH_BYTES * task.count or len(task.tokens) != size:
                raise SinkError(f"sink {self.name!r}: a task of {task.group} is malformed")
            view = self.groups.setdefault(task.group.name, {tier: set() for tier in Tier})
            held, hashes = view[task.tier], split_hashes(task.hashes)
            held.update(hashes) if size else held.difference_update(hashes)

    def view(self) -> dict[Tier, set[bytes]]:
        return {tier: set(hashes) for tier, hashes in self.live_view.items()}

    def _apply(self, task: FlushTask) -> None:
        held, hashes = self.live_view[task.tier], split_hashes(task.hashes)
        self.tasks.append(task)
        self.counts[task.residency] += 1
        if task.residency is Residency.RESIDENT:
            held.update(hashes)
            self._blocks.update(self._blocks_of(task, hashes))
            return
        held.difference_update(hashes)
        for block_hash in hashes:
            if not any(block_hash in others for others in self.live_view.values()):
                self._blocks.pop(block_hash, None)

    def _blocks_of(self, task: FlushTask, hashes: Sequence[bytes]) -> dict[bytes, HeldBlock]:
        """The blocks of a task, without what may change while a block is held."""
        size, first = 4 * self.block_size, task.start_block_idx
        scope, extra_keys = task.scope._replace(lora_id=None), dict(task.extra_keys)
        blocks = {}
        for at, (parent, block_hash) in enumerate(
            zip([task.parent, *hashes], hashes, strict=False), first
        ):
            tokens, extra_key = task.tokens[size * at : size * (at + 1)], extra_keys.get(at, b"")
            blocks[block_hash] = HeldBlock(block_hash, parent, at, tokens, 0, scope, extra_key)
        return blocks

    def _validate(self, task: FlushTask) -> None:
        num_blocks = task.start_block_idx + task.count
        sizes = len(task.hashes), len(task.parent), len(task.tokens)
        expected = HASH_BYTES * task.count, HASH_BYTES, 4 * self.block_size * num_blocks
        if task.count < 1 or sizes != expected:
            raise SinkError(
                f"sink {self.name!r}: a task of {task.count} blocks from {task.start_block_idx} "
                f"has {sizes} bytes of hashes, parent and tokens, not {expected}"
            )
        if not self.epochs or task.epoch != self.epochs[-1]:
            raise SinkError(
                f"sink {self.name!r}: a task of epoch {task.epoch}, the epochs begun are "
                f"{self.epochs[-1:]}"
            )
        above = self._blocks.get(task.parent)
        if above is not None and above.position != task.start_block_idx - 1:
            raise SinkError(
                f"sink {self.name!r}: the block above a run from {task.start_block_idx} is at "
                f"position {above.position}"
            )
        for block_hash, block in self._blocks_of(task, split_hashes(task.hashes)).items():
            if self._blocks.get(block_hash, block) != block:
                raise SinkError(
                    f"sink {self.name!r}: block {block_hash.hex()} was sent with another path"
                )
