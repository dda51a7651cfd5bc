"""Tests of the fakes: a fake that did nothing would prove nothing."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from kvactors.data_plane.base import Direction
from kvactors.data_plane.ranks.leader import RankGroup
from kvactors.data_plane.ranks.protocol import CopyBlocks
from kvactors.device.arena import Arena
from kvactors.device.host import HostDevice
from kvactors.identity import StoreIdentity
from kvactors.layout import make_layout
from kvactors.settings import (
    CacheConfig,
    Config,
    DeviceConfig,
    HostConfig,
    LayoutConfig,
    RanksConfig,
)
from kvactors.storage.messages import Outcome
from kvactors.testing.fakes import SimBackend, SimExecutor
from kvactors.testing.loop import simulate
from tests.support.sim_rank import SimRank

LAYOUT = make_layout(LayoutConfig(num_layers=3, num_kv_heads=1, head_dim=4, dtype="uint8"), 4)
KEYS = [bytes([i]) * 32 for i in range(8)]


def never() -> bool:
    return False


def now() -> float:
    return asyncio.get_running_loop().time()


def simulated(main):
    """A test that is a coroutine function, on the loop of virtual time."""

    def test():
        simulate(main)

    test.__name__ = main.__name__
    return test


class Copies:
    def __init__(self, seconds: float = 1.0) -> None:
        self.device, self.arena = HostDevice(LAYOUT, 8), Arena(8, LAYOUT.block_bytes)
        self.executor = SimExecutor(self.device, self.arena, lambda: seconds)

    def filled(self, count: int = 4) -> bytes:
        keys = b"".join(KEYS[:count])
        self.device.fill(range(count), keys)
        return keys


# -- gates and latencies


# -- copies


@pytest.mark.parametrize("direction", [Direction.TO_HOST, Direction.TO_DEVICE])
def test_a_target_is_no_good_before_the_copys_end(direction):
    async def main():
        it = Copies()
        keys = it.filled()
        await it.executor.run(Direction.TO_HOST, (0, 1), (0, 1))
        copying = asyncio.ensure_future(
            it.executor.run(
                direction, (6, 7) if direction is Direction.TO_DEVICE else (2, 3), (0, 1)
            )
        )
        await asyncio.sleep(0.1)
        if direction is Direction.TO_HOST:
            it.device.copy_to_device((6, 7), it.arena, (0, 1))
            expected = b"".join(KEYS[2:4])
        else:
            expected = keys[:64]
        assert it.device.check((6, 7), expected) == [0, 1]
        await copying
        if direction is Direction.TO_HOST:
            it.device.copy_to_device((6, 7), it.arena, (0, 1))
        assert it.device.check((6, 7), expected) == []

    simulate(main)


@pytest.mark.parametrize("direction", [Direction.TO_HOST, Direction.TO_DEVICE])
def test_a_source_that_is_given_away_too_early_spoils_the_copy(direction):
    async def main():
        it = Copies()
        keys = it.filled()
        await it.executor.run(Direction.TO_HOST, (0, 1, 2, 3), (0, 1, 2, 3))
        pair = ((0,), (5,)) if direction is Direction.TO_HOST else ((5,), (0,))
        copying = asyncio.ensure_future(it.executor.run(direction, *pair))
        await asyncio.sleep(0.1)
        if direction is Direction.TO_HOST:
            it.device.fill((0,), KEYS[7])
        else:
            it.arena.view(0)[:] = bytes(LAYOUT.block_bytes)
        await copying
        if direction is Direction.TO_HOST:
            it.device.copy_to_device((5,), it.arena, (5,))
        assert it.device.check((5,), keys[:32]) == [0]

    simulate(main)


@simulated
async def test_failed_pairs_are_reported_and_do_not_hold_their_bytes():
    it = Copies()
    keys = it.filled()
    await it.executor.run(Direction.TO_HOST, (0, 1, 2), (0, 1, 2))
    it.executor.failing = 2
    assert await it.executor.run(Direction.TO_DEVICE, (4, 5, 6), (0, 1, 2)) == (1, 2)
    assert it.device.check((4, 5, 6), keys[:96]) == [1, 2]
    assert (it.executor.failing, it.executor.failed) == (0, 2)
    assert await it.executor.run(Direction.TO_DEVICE, (4, 5, 6), (0, 1, 2)) == ()


# -- the store


class Store:
    def __init__(self, seconds: float = 1.0, capacity: int = 0) -> None:
        self.store = SimBackend(bytes(32), 64, capacity, lambda: seconds)
        self.data = [bytes([i + 1]) * 64 for i in range(8)]

    async def write(self, *numbers: int) -> list[int]:
        views = [memoryview(bytearray(self.data[i])) for i in numbers]
        return list((await self.store.write([KEYS[i] for i in numbers], views, never)).outcomes)

    async def read(self, *numbers: int) -> list[int]:
        views = [memoryview(bytearray(64)) for _ in numbers]
        outcomes = (await self.store.read([KEYS[i] for i in numbers], views, never)).outcomes
        for i, view, outcome in zip(numbers, views, outcomes, strict=True):
            assert outcome != Outcome.OK or bytes(view) == self.data[i]
        return list(outcomes)


@pytest.mark.parametrize("how", ["torn", "flipped"])
def test_rotten_objects_are_corrupt_and_never_good(how):
    async def main():
        it = Store()
        it.store.tearing = 1 if how == "torn" else 0
        await it.write(0)
        await it.write(1)
        if how == "flipped":
            it.store.flip(1)
        assert await it.read(0, 1) == [Outcome.CORRUPT, Outcome.OK]
        assert not it.store.holds(KEYS[0])
        assert it.store.torn + it.store.flipped == 1

    simulate(main)


@simulated
async def test_a_store_may_be_down_full_slow_or_hang():
    it = Store()
    it.store.down = True
    assert await it.write(0) == [Outcome.UNAVAILABLE]
    it.store.heal()
    it.store.full = True
    assert await it.write(0) == [Outcome.NO_SPACE]
    it.store.heal()
    it.store.slower = 2.0
    began = now()
    assert await it.write(0) == [Outcome.OK]
    assert now() == began + 3.0
    it.store.gate.close()
    reading = asyncio.ensure_future(it.read(0))
    await asyncio.sleep(100.0)
    assert not reading.done()
    it.store.heal()
    assert await reading == [Outcome.OK]
    assert it.store.troubled >= 4


@simulated
async def test_a_view_that_changes_while_it_is_written_spoils_the_object():
    it = Store()
    view = memoryview(bytearray(it.data[0]))
    writing = asyncio.ensure_future(it.store.write([KEYS[0]], [view], never))
    await asyncio.sleep(0.5)
    view[:] = it.data[1]
    await writing
    found = memoryview(bytearray(64))
    assert (await it.store.read([KEYS[0]], [found], never)).outcomes == bytes([Outcome.OK])
    assert bytes(found) not in it.data


# -- sinks


# -- ranks


def two_ranks() -> Config:
    return Config(
        cache=CacheConfig(block_size=4),
        device=DeviceConfig(num_blocks=4),
        host=HostConfig(slots=4, transit_slots=4),
        layout=LayoutConfig(
            num_layers=2, num_kv_heads=2, head_dim=4, dtype="uint8", tensor_parallel=2
        ),
        ranks=RanksConfig(2, "memory://fakes", timeout_s=1.0, startup_timeout_s=10.0),
    )


async def settled(group: RankGroup) -> None:
    with anyio.fail_after(30.0):
        while not group.healthy:
            await asyncio.sleep(0.05)


@simulated
async def test_ranks_answer_late_fall_silent_are_cut_off_and_lose_their_memory():
    config = two_ranks()
    ranks = [SimRank(config, number, latency=lambda: 0.01) for number in range(2)]
    layout = ranks[0].device.layout
    identity = StoreIdentity(config.cache.model, config.storage.namespace, layout.fingerprint)
    group = RankGroup(config.ranks, identity, 4, config.host.arena_slots(stored=False))
    for rank in ranks:
        await rank.start()
    await group.open()

    def copy(op: int) -> CopyBlocks:
        return CopyBlocks(op, Direction.TO_HOST, (0,), (0,))

    began = now()
    assert all(answer is not None for answer in await group.scatter(copy, outcomes=1))
    assert now() >= began + 0.02

    ranks[1].gate.close()
    asking = asyncio.ensure_future(group.scatter(copy, outcomes=1))
    await asyncio.sleep(5.0)
    assert not asking.done()
    assert [one.health for one in group.statistics()] == ["healthy", "silent"]
    ranks[1].gate.open()
    assert None not in await asking
    await settled(group)

    ranks[0].cut()
    while not group.statistics()[0].losses:
        await asyncio.sleep(0.01)
    await settled(group)
    assert group.statistics()[0].losses == 1
    assert ranks[0].starts == 1

    device = ranks[0].device
    device.failing = 1
    answers = await group.scatter(copy, outcomes=1)
    assert [answer.outcomes for answer in answers] == [b"\1", b"\0"]
    assert device.failed == 1

    await ranks[0].stop()
    await asyncio.sleep(1.0)
    assert not group.healthy
    await ranks[0].start()
    await settled(group)
    assert ranks[0].device is not device
    assert ranks[0].starts == 2
    await group.close()
    for rank in ranks:
        await rank.close()
