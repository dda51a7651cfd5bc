"""Tests that the planted bugs asked for: without them a bug of `bugs/prefix_index.txt` went unnoticed."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors.actor import Actor, ActorSpec, Control, Group, InFlight, Message, Supervisor, on
from kvactors.cpu_evictor.slots import HostTier, SlotState
from kvactors.data_plane.base import Direction
from kvactors.gpu_swapper.messages import DataPlaneStatus
from kvactors.testing.loop import simulate
from kvactors.types import Tier
from tests.support.cache import BLOCK, opened, prompt, serve

HOST = {"slots": 8, "transit_slots": 16}


class Unwelcome(Control, frozen=True, eq=False):
    """A message that no actor handles: its receiver fails."""


class Held:
    """Copies in one direction wait until they are released."""

    def __init__(self, cache) -> None:
        self.run = cache.system.plane.engine.run
        self.shut = {Direction.TO_HOST: False, Direction.TO_DEVICE: False}
        self.waiting = dict.fromkeys(self.shut, 0)
        cache.system.plane.engine.run = self.held

    async def held(self, direction, *rest):
        self.waiting[direction] += 1
        while self.shut[direction]:
            await asyncio.sleep(0.001)
        self.waiting[direction] -= 1
        return await self.run(direction, *rest)


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came to that")


# -- the index


async def test_a_load_that_completes_while_a_request_waits_is_counted_once():
    """y shares x's load of six blocks, and would load two more, but has no blocks for them yet.
    When it gets them, the six are on the device."""
    async with opened(device=24, host={"slots": 48, "transit_slots": 16}) as cache:
        await serve(cache, "a", prompt(1, 8))
        await serve(cache, "b", prompt(2, 24))
        await cache.wait_idle()
        held = Held(cache)
        held.shut[Direction.TO_DEVICE] = True
        x = await cache.acquire("x", prompt(1, 6, tail=1))
        await until(lambda: held.waiting[Direction.TO_DEVICE])
        held.shut[Direction.TO_HOST] = True
        later = asyncio.create_task(cache.acquire("y", [*prompt(1, 8), *prompt(3, 7)]))
        await until(lambda: held.waiting[Direction.TO_HOST])
        held.shut[Direction.TO_DEVICE] = False
        await x.wait_ready()
        assert x.hits == (0, 6, 0)
        assert not later.done()
        held.shut[Direction.TO_HOST] = False
        y = await later
        await y.wait_ready()
        assert y.hits == (6, 2, 0)
        assert y.cached_tokens == 8 * BLOCK
        await x.finish()
        await y.finish()


async def test_clear_takes_the_host_too():
    async with opened(host=HOST) as cache:
        await serve(cache, "a", prompt(1, 6))
        await serve(cache, "b", prompt(2, 6))
        await cache.wait_idle()
        assert cache.statistics().host.resident
        await cache.clear()
        await cache.wait_flushed()
        assert cache.statistics().host.resident == 0
        assert not any(cache.sinks["memory"].view().values())


@pytest.mark.parametrize("victim", ["index", "evictor"])
async def test_blocks_of_a_failed_actor_are_sent_as_gone_before_any_is_announced_again(victim):
    async with opened(host=HOST) as cache:
        await serve(cache, "a", prompt(1, 6))
        await serve(cache, "b", prompt(2, 6))
        await cache.wait_flushed()
        view = cache.sinks["memory"].view
        assert view()[Tier.DEVICE]
        assert view()[Tier.HOST]
        getattr(cache.system, victim).try_tell(Unwelcome())
        await asyncio.sleep(0.01)
        await cache.wait_flushed()
        assert cache.statistics().supervisor.failures == 1
        assert view()[Tier.HOST] == set()
        assert bool(view()[Tier.DEVICE]) is (victim == "evictor")
        assert cache.count_divergent_blocks() == 0


async def test_blocks_lost_with_a_rank_are_not_hits():
    async with opened(host=HOST) as cache:
        await serve(cache, "a", prompt(1, 6))
        lease = await cache.acquire("a", prompt(1, 6, tail=1))
        assert lease.hits.device == 6
        await cache.system.index.tell(DataPlaneStatus(True, True, 1))
        await cache.wait_idle()
        with pytest.raises(kvactors.RankLost):
            await lease.commit(lease.num_tokens)
        await lease.finish()
        await cache.wait_flushed()
        assert cache.sinks["memory"].view()[Tier.DEVICE] == set()
        again = await cache.acquire("a", prompt(1, 6, tail=1))
        await again.wait_ready()
        assert again.hits == (0, 0, 0)
        await again.finish()


async def test_a_load_counts_only_with_the_load_of_its_parent():
    """y's own load arrives before x's, which y shares and which fails: without its parents no block
    of y's is of any use."""
    async with opened(device=32, host={"slots": 48, "transit_slots": 16}) as cache:
        await serve(cache, "a", prompt(1, 8))
        await serve(cache, "b", prompt(2, 32))
        await cache.wait_idle()
        run, shut, calls = cache.system.plane.engine.run, [True], []

        async def first_fails(direction, blocks, *rest):
            if direction is not Direction.TO_DEVICE or calls:
                calls.append(blocks)
                return await run(direction, blocks, *rest)
            calls.append(blocks)
            while shut:
                await asyncio.sleep(0.001)
            return tuple(range(len(blocks)))

        free = await cache.acquire("room", prompt(9, 16))
        await free.preempt(0)
        cache.system.plane.engine.run = first_fails
        x = await cache.acquire("x", prompt(1, 6, tail=1))
        y = await cache.acquire("y", prompt(1, 8, tail=1))
        await until(lambda: len(calls) == 2)
        await asyncio.sleep(0.02)
        assert cache.statistics().prefix.loads_in_flight == 2
        shut.clear()
        await asyncio.gather(x.wait_ready(), y.wait_ready())
        assert x.hits == y.hits == (0, 0, 0)
        await cache.wait_idle()
        assert cache.check() == []
        await x.finish()
        await y.finish()


async def test_blocks_being_saved_when_the_host_tier_failed_are_released():
    async with opened(
        host=HOST, storage={"backend": "memory", "write_policy": "write_through"}
    ) as cache:
        held = Held(cache)
        held.shut[Direction.TO_HOST] = True
        await serve(cache, "a", prompt(1, 6))
        await until(lambda: held.waiting[Direction.TO_HOST])
        assert cache.statistics().prefix.saves_in_flight == 1
        cache.system.evictor.try_tell(Unwelcome())
        await asyncio.sleep(0.02)
        held.shut[Direction.TO_HOST] = False
        await cache.wait_idle()
        index = cache.statistics().prefix
        assert index.saves_in_flight == index.nodes_referenced == 0
        assert (await serve(cache, "b", prompt(2, 8))).hits == (0, 0, 0)


# -- the host tier


def test_a_slot_is_free_with_its_last_use_and_not_before():
    tier = HostTier(2, 3)
    entry = tier.add(b"a", b"", SlotState.TRANSIT)  # arriving, and pinned by the copy
    tier.pin(entry)  # and by a write
    tier.drop(entry)
    assert tier.free == 2
    tier.unpin(entry)
    assert tier.free == 2
    others = [tier.add(bytes([i]), b"", SlotState.TRANSIT) for i in range(2)]
    assert entry.slot not in {other.slot for other in others}
    tier.check()
    tier.unpin(entry)
    assert tier.free == 1
    tier.check()


# -- actors


class Note(Message, frozen=True, eq=False):
    value: int


class Fragile(Actor):
    """Fails on a 0."""

    ROLE = "fragile"

    def __init__(self, ref) -> None:
        super().__init__(ref)
        self.heard = []

    @on(Note)
    def note(self, message):
        self.heard.append(1 // message.value)


def test_messages_to_a_failed_actor_do_not_reach_its_next_incarnation():
    """Parked senders put their messages when the channel has a place: into the next incarnation's
    channel."""

    async def main() -> None:
        supervisor = Supervisor(InFlight())
        ref = supervisor.make_ref(Fragile, 1)
        async with supervisor.running(Group("one", (ActorSpec(Fragile, Fragile, ref),))):
            await asyncio.gather(*(ref.tell(Note(value)) for value in (0, 1, 1, 1)))
            await supervisor.in_flight.wait_idle()
            assert ref.incarnation == 1
            assert supervisor.actor("fragile").heard == []
            await ref.tell(Note(1))
            await supervisor.in_flight.wait_idle()
            assert supervisor.actor("fragile").heard == [1]

    simulate(main)
