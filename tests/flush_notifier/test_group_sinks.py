"""Sinks of caches with groups of layers: what they are sent of each group is what its tiers hold."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvactors.errors import SinkError
from kvactors.flush_notifier.messages import FlushTask
from kvactors.flush_notifier.sinks import Sink
from kvactors.identity import CacheScope
from kvactors.native import Path
from kvactors.types import Residency, Tier, split_hashes
from tests.flush_notifier.helpers import until
from tests.support.cache import BLOCK
from tests.support.layers import Model, opened, state, window

pytestmark = pytest.mark.full

GROUPS = [window(20, slots=10), state(6, slots=3)]
TIERS: dict[str, Any] = {"host": {"slots": 8}, "storage": {"backend": "memory"}}
ALL = ["device", "host", "storage"]


class Index(Sink):
    """Keeps (group, tier, hash), with the tokens, and fails some calls after a part of the tasks."""

    takes_groups = True

    def __init__(self, failing: int = 0) -> None:
        super().__init__("index")
        self.held: dict[Any, bytes] = {}
        self.failing, self.calls = failing, 0
        self.inside = self.overlaps = False  # a call, and another within it

    async def begin_epoch(self, epoch: int) -> None:
        self.held.clear()

    async def deliver(self, tasks: Sequence[FlushTask]) -> None:
        self.overlaps |= self.inside
        self.inside = True
        try:
            for number, task in enumerate(tasks):
                self.calls += 1
                await asyncio.sleep(0)
                if self.failing and self.calls % self.failing == 0:
                    self.num_acknowledged = number
                    raise SinkError("the index is away")
                self._apply(task)
            self.num_acknowledged = len(tasks)
        finally:
            self.inside = False

    def _apply(self, task: FlushTask) -> None:
        group = task.group and task.group.name
        for at, name in enumerate(split_hashes(task.hashes)):
            key = group, task.tier, name
            if task.residency is Residency.GONE:
                self.held.pop(key, None)
            elif group is not None:
                self.held[key] = task.tokens[4 * BLOCK * at : 4 * BLOCK * (at + 1)]
            else:
                self.held[key] = b""


async def traffic(cache: Any, seed: int = 1, requests: int = 12) -> list[list[int]]:
    model, rng = Model(cache), random.Random(seed)
    said = [[rng.randrange(50) for _ in range(rng.randrange(8, 30))] for _ in range(3)]
    for number in range(requests):
        await model.serve(f"r{number}", rng.choice(said), [1, 2, 3])
    return said


@pytest.mark.parametrize("failing", [0, 3])
async def test_an_index_has_the_blocks_of_each_group(failing):
    index = Index(failing)
    async with opened(GROUPS, sinks=[index], **TIERS) as cache:
        said = await traffic(cache)
        await cache.wait_flushed()
        assert cache.count_divergent_blocks() == 0
        assert not index.overlaps
        assert {group for group, _, _ in index.held} == {None, "window", "state"}
        names = {}
        for tokens in said:  # as a reader computes them
            path = Path(
                BLOCK, CacheScope("layers", "default").root(cache.system.layout.fingerprint)
            )
            path.extend([*tokens, 1, 2, 3])
            for at, name in enumerate(split_hashes(path.hashes(0, path.num_full_blocks))):
                names[name] = path.tokens(at, at + 1)
        of_groups = {key: tokens for key, tokens in index.held.items() if key[0]}
        assert all(names[name] == tokens for (_, _, name), tokens in of_groups.items())


async def test_an_index_of_finished_requests_has_the_blocks_that_they_left_behind():
    index = Index()
    index.filter = index.filter._replace(at_finish=True)
    async with opened(GROUPS, sinks=[index], **TIERS) as cache:
        await traffic(cache)
        await cache.wait_flushed()
        for name, group in cache.groups.items():
            held = [key for key in index.held if key[:2] == (name, Tier.DEVICE)]
            assert len(held) == group.system.index_actor.index.tree.statistics()["device"] > 0


async def test_a_reset_of_the_sink_sends_the_groups_again():
    index = Index()
    async with opened(GROUPS, sinks=[index], **TIERS) as cache:
        await traffic(cache)
        await cache.wait_flushed()
        before = dict(index.held)
        index.held.clear()
        await cache.resync("index")
        await until(lambda: index.held == before)


async def test_a_clear_leaves_nothing_of_a_group():
    index = Index()
    async with opened(GROUPS, sinks=[index], **TIERS) as cache:
        await traffic(cache)
        await cache.clear(storage=True)
        await cache.wait_flushed()
        assert index.held == {}


async def test_a_sink_that_does_not_take_groups_is_sent_none():
    index = Index()
    index.takes_groups = False
    async with opened(GROUPS, sinks=[index]) as cache:
        await traffic(cache)
        await cache.wait_flushed()
        assert {group for group, _, _ in index.held} == {None}


@pytest.mark.parametrize("dialect", ["map", "array"])
async def test_events_have_the_fields_of_hybrid_models(tmp_path, dialect):
    sinks = [
        {
            "kind": "kv_events",
            "endpoint": f"ipc://{tmp_path}/events",
            "replay_endpoint": f"ipc://{tmp_path}/replay",
            "dialect": dialect,
        }
    ]
    with zmq.asyncio.Context() as context:
        async with opened(GROUPS, flush={"sinks": sinks}, **TIERS) as cache:
            said = await traffic(cache, requests=4)
            await cache.wait_flushed()
            with context.socket(zmq.DEALER) as dealer:
                dealer.connect(f"ipc://{tmp_path}/replay")
                await dealer.send_multipart([b"", bytes(8)])
                events = []
                while (message := await dealer.recv_multipart())[-1]:
                    events += msgspec.msgpack.decode(message[-1])[1]
            held = {
                number: set(_held(cache, name))
                for number, name in enumerate(("window", "state"), 1)
            }
    found: dict[Any, set[int]] = {1: set(), 2: set()}
    for event in events:
        if dialect == "map":
            number = event.get("group_idx")
            event = [event["type"], *(one for name, one in event.items() if name != "type")]
        else:
            number = event[9] if len(event) > 9 else event[3] if len(event) == 4 else None
        if number is None:
            continue
        if event[0] == "BlockRemoved":
            found[number] -= {(event[2], name) for name in event[1]}
            continue
        assert event[2] is None, "a block of a group has no parent"
        assert len(event[3]) == BLOCK * len(event[1])
        assert event[-2:] == [["sliding_window", 10], ["mamba", None]][number - 1]
        found[number] |= {(event[6], name) for name in event[1]}
    assert found == held
    assert all(held.values())
    assert said


def _held(cache: Any, name: str) -> Any:
    """(medium, last 8 bytes of the hash) of every block that the tiers of a group have."""
    media = {1: "GPU", 2: "CPU", 4: "STORAGE"}
    sink = cache.groups[name].sinks["kv_events"]
    for block, tiers in sink._held.values():
        for bit, medium in media.items():
            if tiers & bit:
                yield medium, int.from_bytes(block[-8:], "big")
