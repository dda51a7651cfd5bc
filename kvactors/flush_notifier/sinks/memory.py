"""A sink that keeps what it was told: the mirror that tests and reports compare with the tiers. It
can be told to misbehave."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

import anyio

from kvactors.discreet import discreet
from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks.base import Sink
from kvactors.sink_config import MemorySinkConfig
from kvactors.types import KEY_BYTES, Residency, Tier, split_keys

KEEP = 10_000
"""Tasks remembered."""


class Place(NamedTuple):
    """Where a block stands in its path, and what it is made of. It never changes while the block is
    resident anywhere."""

    position: int
    parent: bytes
    tokens: bytes
    lora: str | None = None
    salt: str | None = None
    extra_key: bytes = b""

    def __repr__(self) -> str:
        return discreet(self)


class MemorySink(Sink):
    """tasks: the last ones taken. counts: tasks by residency. epochs: those begun.

    failing: refuse every call. fail_every: refuse every n-th call. hang: seconds every call takes.
    lose_answers: do what is asked and then fail all the same.
    """

    def __init__(self, config: MemorySinkConfig, block_size: int) -> None:
        super().__init__(config, block_size)
        self.tasks: deque[FlushTask] = deque(maxlen=KEEP)
        self.counts: Counter[Residency] = Counter()
        self.epochs: list[int] = []
        self.failing = False
        self.fail_every = 0
        self.hang = 0.0
        self.lose_answers = False
        self.calls = 0
        self._mirror: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
        self._places: dict[bytes, Place] = {}  # of the blocks in the mirror

    async def begin(self, epoch: int) -> None:
        """See `Sink.begin`."""
        await self._misbehave()
        self.epochs.append(epoch)
        self._mirror = {tier: set() for tier in Tier}
        self._places = {}
        self._answer()

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        """See `Sink.deliver`. SinkError for a task that is not well formed or contradicts an
        earlier one; then none of them counts."""
        await self._misbehave()
        for task in tasks:
            self._validate(task)
        for task in tasks:
            self._take(task)
        self._answer()

    def lose_state(self) -> None:
        """Hold nothing from now on, as an index that was restarted or emptied, without a sign of it
        to its sender."""
        self._mirror = {tier: set() for tier in Tier}
        self._places = {}

    def view(self) -> dict[Tier, set[bytes]]:
        """Block hashes by tier (a copy)."""
        return {tier: set(keys) for tier, keys in self._mirror.items()}

    @property
    def live_view(self) -> Mapping[Tier, AbstractSet[bytes]]:
        """The same without a copy, for a look at single blocks: deliveries change it."""
        return self._mirror

    def _take(self, task: FlushTask) -> None:
        held, keys = self._mirror[task.tier], split_keys(task.keys)
        self.tasks.append(task)
        self.counts[task.residency] += 1
        if task.residency is Residency.RESIDENT:
            held.update(keys)
            self._places.update(self._places_in(task, keys))
            return
        held.difference_update(keys)
        for key in keys:
            if not any(key in others for others in self._mirror.values()):
                self._places.pop(key, None)

    def _places_in(self, task: FlushTask, keys: Sequence[bytes]) -> dict[bytes, Place]:
        size, first = 4 * self.block_size, task.start_block_idx
        extra_keys, (lora, salt, _) = dict(task.extra_keys), task.origin
        blocks = [task.tokens[i : i + size] for i in range(size * first, len(task.tokens), size)]
        places = zip(range(first, first + len(keys)), [task.parent, *keys], blocks, strict=False)
        made = (
            Place(at, parent, tokens, lora, salt, extra_keys.get(at, b""))
            for at, parent, tokens in places
        )
        return dict(zip(keys, made, strict=True))

    def _validate(self, task: FlushTask) -> None:
        blocks = task.start_block_idx + task.count
        sizes = len(task.keys), len(task.parent), len(task.tokens)
        if task.count < 1 or sizes != (
            KEY_BYTES * task.count,
            KEY_BYTES,
            4 * self.block_size * blocks,
        ):
            raise SinkError(
                f"sink {self.name!r}: a task of {task.count} blocks from {task.start_block_idx} "
                "does not add up"
            )
        if not self.epochs or task.epoch != self.epochs[-1]:
            raise SinkError(f"sink {self.name!r}: a task of epoch {task.epoch} outside of it")
        above = self._places.get(task.parent)
        if above is not None and above.position != task.start_block_idx - 1:
            raise SinkError(
                f"sink {self.name!r}: the block above a run from {task.start_block_idx} stands at "
                f"{above.position}"
            )
        for key, place in self._places_in(task, split_keys(task.keys)).items():
            if self._places.get(key, place) != place:
                raise SinkError(f"sink {self.name!r}: block {key.hex()} was told with another path")

    async def _misbehave(self) -> None:
        self.calls += 1
        if self.hang:
            await anyio.sleep(self.hang)
        if self.failing or (self.fail_every and self.calls % self.fail_every == 0):
            raise SinkError(f"sink {self.name!r} was told to fail")

    def _answer(self) -> None:
        if self.lose_answers:
            raise SinkError(f"sink {self.name!r} was told to lose its answer")
