"""A store of one rank that is slow or hangs: copies go on, nothing waits without a limit, and the
rank's process ends in time."""

from __future__ import annotations

import asyncio
import contextlib

import structlog

from kvactors import StoreError
from kvactors.actor.clock import now
from kvactors.data_plane.ranks.protocol import CopyBlocks, Ping, Pong, RankAnswer, StoreObjects
from kvactors.settings import ActorsConfig
from kvactors.storage.backend import SlotViews
from kvactors.storage.memory import MemoryBackend
from tests.ranks.manual import A, copy, opened, settle, simulated
from tests.ranks.simulated import (
    BLOCK,
    Rank,
    all_there,
    at_rest,
    led,
    prompt,
    serve,
    settings,
    stored,
)


async def store_operation(group, store, wires):
    """A read of one object that rank 1 has answered and rank 0 has not, and its number."""
    reading = asyncio.ensure_future(store.read([A], SlotViews(None, [0]), lambda: False))
    asked = [await wire.receive() for wire in wires]
    assert all(isinstance(message, StoreObjects) for message in asked)
    wires[1].send(RankAnswer(asked[1].op, bytes(1)))
    await settle()
    return reading, asked[0].op


async def copied(group, wires) -> bool:
    """Whether a copy can be made now."""
    copying = asyncio.ensure_future(group.scatter(copy, outcomes=2))
    await settle()
    if copying.done():
        return False
    for wire in wires:
        message = await wire.receive()
        assert isinstance(message, CopyBlocks)
        wire.send(RankAnswer(message.op, bytes(2)))
    await copying
    return True


@simulated
async def test_a_rank_whose_store_is_late_is_asked_whether_it_works_and_copies_go_on():
    async with opened(A, A) as (group, store, wires):
        reading, op = await store_operation(group, store, wires)
        for _ in range(3):
            assert isinstance(await wires[0].receive(), Ping)
            wires[0].send(Pong())
            await settle()
            assert group.healthy
            assert await copied(group, wires)
        wires[0].send(RankAnswer(op, bytes(1)))
        assert (await reading).outcomes == bytes(1)
        await asyncio.sleep(1.0)
        assert group.healthy
        assert group.statistics()[0].silences == 0


@simulated
async def test_a_stopped_rank_whose_store_is_late_is_silent_until_it_answers_the_ping():
    async with opened(A, A) as (group, store, wires):
        reading, op = await store_operation(group, store, wires)
        await asyncio.sleep(1.0)
        assert [rank.health for rank in group.statistics()] == ["silent", "healthy"]
        assert not await copied(group, wires)
        assert isinstance(await wires[0].receive(), Ping)
        wires[0].send(Pong())
        await settle()
        assert group.healthy
        assert await copied(group, wires)
        assert not reading.done()
        await asyncio.sleep(1.0)  # its store is still late, and now it does not answer
        assert not group.healthy
        wires[0].send(RankAnswer(op, bytes(1)))
        await reading
        assert group.healthy


@simulated
async def test_a_lost_rank_ends_its_pings():
    async with opened(A, A) as (group, store, wires):
        reading, _ = await store_operation(group, store, wires)
        assert isinstance(await wires[0].receive(), Ping)
        wires[0].close()
        await settle()
        assert [rank.health for rank in group.statistics()] == ["away", "healthy"]
        assert not reading.done()
    assert (await reading).outcomes != bytes(1)
    assert len(asyncio.all_tasks()) == 1


class Hanging(MemoryBackend):
    """Calls do not return, cancelled or not, while `flows` is not set."""

    def __init__(self, *arguments, what):
        super().__init__(*arguments)
        self.what = what
        self.flows = asyncio.Event()
        self.hung = 0

    async def _hang(self, what):
        if what != self.what:
            return
        self.hung += 1
        while not self.flows.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self.flows.wait()

    async def open(self):
        await self._hang("open")

    async def load(self, key, into):
        await self._hang("read")
        return await super().load(key, into)

    async def close(self):
        pass


def config(**over):
    return settings(
        storage=stored(timeout_s=1.0),
        actors=ActorsConfig(drain_timeout_s=2.0, open_timeout_s=3.0),
        **over,
    )


@simulated
async def test_a_store_that_hangs_in_one_rank_costs_misses_and_no_copy():
    hanging = None
    with structlog.testing.capture_logs():
        async with led(config()) as (cache, ranks):
            await all_there(cache)
            layout = ranks[0].layout
            for family in range(12):  # more than device and host hold
                await serve(cache, ranks, prompt(family, 4), deadline=2.0)
            await cache.wait_idle()
            await ranks[0].stop()
            hanging = Hanging(layout.fingerprint, layout.block_bytes, 60, what="read")
            for key in list(ranks[0].store.objects):
                view = memoryview(bytearray(layout.block_bytes))
                await ranks[0].store.load(key, view)
                await hanging.write([key], [view], lambda: False)
            ranks[0].store = hanging
            await ranks[0].start()
            await all_there(cache)
            began = now()
            await serve(cache, ranks, prompt(0, 4), deadline=2.0)
            assert hanging.hung
            assert now() - began < 3.0
            for family in (20, 21, 20, 21):  # device and host work, although the read still hangs
                lease, _ = await serve(cache, ranks, prompt(family, 4), deadline=2.0)
            assert lease.cached_tokens == 4 * BLOCK
            assert cache.system.ranks.healthy
            reasons = {one.component: one.why for one in cache.health().reasons}
            assert reasons == {"store": "a call of read does not return"}
            hanging.flows.set()
            await at_rest(cache)
            assert cache.health().status == "ok"


@simulated
async def test_a_rank_ends_in_time_while_its_store_hangs_and_ignores_its_cancellation():
    with structlog.testing.capture_logs() as logs:
        async with led(config()) as (cache, ranks):
            await all_there(cache)
            for family in range(12):
                await serve(cache, ranks, prompt(family, 4), deadline=2.0)
            await cache.wait_idle()
            hanging = [rank.store for rank in ranks]
            for rank, store in zip(ranks, hanging, strict=True):
                store.hang = Hanging(rank.layout.fingerprint, rank.layout.block_bytes, what="read")
                load = store.load

                async def late(key, into, hang=store.hang, load=load):
                    await hang._hang("read")
                    return await load(key, into)

                store.load = late
            await serve(cache, ranks, prompt(0, 4), deadline=2.0)
            assert all(store.hang.hung for store in hanging)
            servings = [rank.serving for rank in ranks]
            for serving in servings:
                serving.cancel()
            _, late = await asyncio.wait(servings, timeout=10.0)
            for store in hanging:
                store.hang.flows.set()
            assert not late
    assert [
        one
        for one in logs
        if one["event"] == "operations did not end before the shutdown's deadline"
    ]
    assert [one for one in logs if one["event"].startswith("arena memory stays mapped")]


@simulated
async def test_a_store_of_a_rank_that_does_not_open_is_an_error_in_time():
    rank = Rank(config(), 0)
    rank.store = Hanging(rank.layout.fingerprint, rank.layout.block_bytes, what="open")
    began = now()
    with structlog.testing.capture_logs():
        await rank.start()
        await asyncio.wait((rank.serving,))
    assert isinstance(rank.serving.exception(), StoreError)
    assert "store did not open in 3 s (actors.open_timeout_s)" in str(rank.serving.exception())
    assert now() - began < 10.0
    rank.store.flows.set()
    await rank.close()
