"""Paths of tiny blocks named as they are in earnest, and a wired notifier."""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np

from kvactors.actor import ActorSpec, Group, InFlight, Supervisor
from kvactors.actor.sliced import finish
from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import PathCached, WaitFlushed
from kvactors.flush_notifier.sinks.memory import MemorySink
from kvactors.flush_notifier.view import DeliveryBatch, SinkFilter
from kvactors.identity import hash_of_block
from kvactors.settings import FlushConfig
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.testing.faults import FaultySink
from kvactors.types import ALL_TIERS, HASH_BYTES, Reason, Tier, hash_at, join_hashes, split_hashes
from tests.support.deadline import deadline_after

BLOCK = 2
ROOT = bytes(32)
SALTED = 77
"""A path that begins with this branch hangs on another root."""
BOTH = int(Tier.DEVICE | Tier.HOST)
PER_TIER = SinkFilter(BOTH, node=False, at_finish=False)
NODE = SinkFilter(BOTH, node=True, at_finish=False)
AT_FINISH = SinkFilter(BOTH, node=False, at_finish=True)
EVERYTHING = SinkFilter(int(ALL_TIERS), node=False, at_finish=False)


def root_of(*branch: int) -> bytes:
    return bytes([SALTED]) * 32 if branch[:1] == (SALTED,) else ROOT


def path(*branch: int) -> tuple[bytes, bytes]:
    """Tokens and names of the path that takes these branches, one block each."""
    tokens, keys, key = [], [], root_of(*branch)
    for step in branch:
        tokens.append(np.array([step, step], "<u4").tobytes())
        key = hash_of_block(key, tokens[-1])
        keys.append(key)
    return b"".join(tokens), join_hashes(keys)


def known(ledger: Ledger) -> set[bytes]:
    """The hashes of the blocks whose path is known."""
    return {ledger.tree.rows.hash(block) for block in ledger.tree.scan()}


def path_tokens(ledger: Ledger, block_hash: bytes) -> bytes:
    """The complete token path from the root to a block."""
    tree = ledger.tree
    return tree.rows.tokens_of(finish(tree.path_to(tree.find(block_hash))))


def names(*branch: int) -> list[bytes]:
    return split_hashes(path(*branch)[1])


def announced(
    *branch: int, start=0, count=None, tier=Tier.DEVICE, reason=Reason.COMMIT
) -> PathCached:
    tokens, keys = path(*branch)
    count, root = len(branch) - start if count is None else count, root_of(*branch)
    parent = hash_at(keys, start - 1) if start else root
    return PathCached(
        root,
        tokens[4 * BLOCK * start :],
        keys[HASH_BYTES * start :],
        start,
        count,
        tier,
        reason,
        parent,
    )


def finished(*branch: int) -> PathCached:
    return announced(*branch, reason=Reason.REQUEST_FINISH)


def ledger(*filters, idle_limit=100, takes_clear=()) -> Ledger:
    chosen = [
        one._replace(takes_clear=i in takes_clear) for i, one in enumerate(filters or (PER_TIER,))
    ]
    return Ledger(BLOCK, chosen, idle_limit, token_root=ROOT)


def do(steps) -> None:
    """All steps of a fact."""
    deque(steps, maxlen=0)


def take(book: Ledger, sink: int, limit: int, epoch: int) -> DeliveryBatch:
    """All steps of the next batch."""
    return finish(book.sinks[sink].take(limit, epoch))


def delivered(book: Ledger, sink: int, batch: DeliveryBatch) -> None:
    """A sink acknowledged a batch."""
    finish(book.sinks[sink].delivered(batch))


def refused(book: Ledger, sink: int, batch: DeliveryBatch) -> None:
    """A sink did not acknowledge a batch."""
    finish(book.sinks[sink].refused(batch))


def held(book: Ledger, sink: int = 0) -> dict[bytes, int]:
    """A sink's view: the tiers of each block that it has."""
    return {block.hash: block.tiers for block in book.sinks[sink].held_blocks() if block.tiers}


def settle(book: Ledger, sink: int = 0):
    """Deliver everything that is pending. Returns the tasks."""
    batch = take(book, sink, 10**6, 1)
    delivered(book, sink, batch)
    return batch.tasks


def faulty(name: str, **config) -> FaultySink:
    """A sink in memory that can be made to fail."""
    return FaultySink(memory(name, **config))


async def until(condition, seconds=30.0):
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while not condition():
        assert loop.time() < end, "it did not come about"
        await asyncio.sleep(0.005)


class Wired:
    """A notifier and its sinks. config: arguments of FlushConfig."""

    def __init__(self, *sinks, block=BLOCK, **config):
        self.supervisor = Supervisor(InFlight())
        self.ref = self.supervisor.make_ref(FlushNotifier, 64)
        self.sinks = sinks or (memory("good"), memory("bad"))
        self.block = block
        self.config = FlushConfig(
            **{"retry_min_s": 0.01, "retry_max_s": 0.04, "timeout_s": 10.0, **config}
        )

    def make(self, ref):
        return FlushNotifier(
            ref,
            block_size=self.block,
            sinks=self.sinks,
            config=self.config,
            epoch=100,
            token_root=ROOT,
        )

    def running(self):
        spec = ActorSpec(FlushNotifier, self.make, self.ref)
        return self.supervisor.running(Group("notifier", (spec,)), drain=1.0)

    @property
    def actor(self) -> FlushNotifier:
        return self.supervisor.actor("flush_notifier")

    async def tell(self, *messages):
        for message in messages:
            await self.ref.tell(message)

    async def settle(self, seconds=5.0):
        assert await self.ref.ask(WaitFlushed(), deadline=deadline_after(seconds)) is True
        self.actor.check()


def memory(name: str, **config) -> MemorySink:
    return MemorySink(MemorySinkConfig(name=name, **{"tiers": ("device", "host"), **config}), BLOCK)
