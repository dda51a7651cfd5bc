"""`acquire(wait_for_room=True)`: first come, first served, until other requests release blocks."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors.actor.clock import now
from kvactors.prefix_index import waiting as queue
from kvactors.prefix_index import work
from tests.support.cache import BLOCK, opened, prompt, serve

HOST = {"slots": 8, "transit_slots": 16}
STORE = {"backend": "memory", "write_policy": "write_through"}
TIERS = [{}, {"host": HOST}, {"host": HOST, "storage": STORE}]


def waiting(cache):
    return cache.free_blocks().waiting


async def queued(cache, number, count, blocks, **options):
    """A request that waits, once it is in the queue."""
    one = asyncio.ensure_future(
        cache.acquire(f"w{number}", prompt(100 + number, blocks), wait_for_room=True, **options)
    )
    while waiting(cache) < count:
        await asyncio.sleep(0)
        assert not one.done()
    return one


@pytest.mark.parametrize("tiers", TIERS, ids=["device", "host", "storage"])
@pytest.mark.parametrize("end", ["finish", "preempt", "abandon", "del"])
async def test_a_request_gets_its_blocks_when_another_ends(tiers, end):
    async with opened(device=8, **tiers) as cache:
        lease = await cache.acquire("runs", prompt(1, 6))
        one = await queued(cache, 1, 1, 4)
        await cache.wait_idle()
        assert not one.done()
        if end == "del":
            with pytest.warns(ResourceWarning):
                del lease
        else:
            ended = getattr(lease, end)()
            if ended is not None:
                await ended
        granted = await one
        assert len(granted.block_table) == 4
        assert waiting(cache) == 0
        await granted.finish()


async def test_requests_are_admitted_in_order(monkeypatch):
    """Small ones do not overtake a large one any more."""
    monkeypatch.setattr(queue, "OVERTAKEN", 0)
    order = []

    async def serve_one(number, one):
        lease = await one
        order.append(number)
        await asyncio.sleep(0)
        await lease.finish()

    async with opened(device=8) as cache:
        first = await cache.acquire("first", prompt(1, 4))
        second = await cache.acquire("second", prompt(2, 2))
        large = await queued(cache, 1, 1, 8)
        small = [await queued(cache, n, n, 1) for n in range(2, 6)]
        done = asyncio.gather(*(serve_one(n, one) for n, one in enumerate([large, *small])))
        with pytest.raises(kvactors.NoRoom) as refused:
            await cache.acquire("now", prompt(3, 1))
        assert not isinstance(refused.value, kvactors.NeverFits)
        assert (refused.value.needed, refused.value.available) == (1, 0)
        await second.finish()
        await cache.wait_idle()
        assert order == [], "a small request took the blocks that the large one waits for"
        await first.finish()
        await done
        assert order == [0, 1, 2, 3, 4]
        assert waiting(cache) == 0


@pytest.mark.parametrize("wait", [False, True])
async def test_a_request_is_overtaken_a_bounded_number_of_times(wait, monkeypatch):
    """Four of eight blocks are free, and the first request that waits needs all eight."""
    monkeypatch.setattr(queue, "OVERTAKEN", 3)
    async with opened(device=8) as cache:
        runs = await cache.acquire("runs", prompt(1, 4))
        large = await queued(cache, 1, 1, 8)
        for number in range(3):
            await (await cache.acquire("small", prompt(2, 1), wait_for_room=wait)).finish()
            assert number < 3
        with pytest.raises(kvactors.DeadlineExceeded if wait else kvactors.NoRoom):
            await cache.acquire("small", prompt(2, 1), wait_for_room=wait, deadline=0.05)
        await runs.finish()
        await (await large).finish()
        await (await cache.acquire("small", prompt(2, 1), wait_for_room=wait)).finish()


@pytest.mark.parametrize("tokens", [13 * BLOCK, 16 * BLOCK])
async def test_a_request_that_pins_keep_out_is_refused_at_once(tokens):
    async with opened(device=16) as cache:
        await serve(cache, "system", prompt(1, 4), hints=kvactors.Hints(pin=True))
        large = list(range(1000, 1000 + tokens))
        for wait in (False, True):
            with pytest.raises(kvactors.NoRoom, match="12 available, 4 pinned: only the end of"):
                await cache.acquire("large", large, wait_for_room=wait)
        with pytest.raises(kvactors.NoRoom, match="only the end of a pin"):
            await cache.acquire("large", large, chunk_tokens=1)
        index = cache.statistics().prefix
        assert (index.no_room, index.refused_pins, index.refused_size) == (3, 3, 0)
        with pytest.raises(kvactors.NeverFits):
            await cache.acquire("larger", list(range(17 * BLOCK)))
        assert cache.statistics().prefix.refused_size == 1
        assert await cache.unpin(prompt(1, 4)) == 4
        await (await cache.acquire("large", large)).finish()


@pytest.mark.parametrize("ttl", [0.05, 100.0])
async def test_a_request_waits_for_pins_that_end_before_its_deadline(ttl):
    async with opened(device=16) as cache:
        await serve(cache, "system", prompt(1, 4), hints=kvactors.Hints(pin=True, ttl=ttl))
        call = cache.acquire("large", prompt(2, 16), wait_for_room=True, deadline=20.0)
        if ttl < 20.0:
            await (await call).finish()
        else:
            with pytest.raises(kvactors.NoRoom, match="4 pinned"):
                await call


async def test_a_pin_refuses_the_requests_that_wait_and_can_get_no_blocks_any_more():
    async with opened(device=16) as cache:
        runs = await cache.acquire("runs", prompt(1, 4))
        other = await cache.acquire("other", prompt(4, 8))
        large = await queued(cache, 1, 1, 13)
        small = await queued(cache, 2, 2, 12)
        await runs.finish(4 * BLOCK, hints=kvactors.Hints(pin=True))
        with pytest.raises(kvactors.NoRoom, match=r"13 device blocks needed, .* 4 pinned"):
            await large
        assert not small.done()
        await other.finish()
        await (await small).finish()


@pytest.mark.parametrize("seconds", [0.02, 0.3])
async def test_the_deadline_ends_the_wait(seconds):
    async with opened(device=4) as cache:
        lease = await cache.acquire("runs", prompt(1, 3))
        began = now()
        with pytest.raises(kvactors.DeadlineExceeded, match="in time"):
            await cache.acquire("late", prompt(2, 2), wait_for_room=True, deadline=seconds)
        assert now() - began >= seconds
        assert waiting(cache) == 0
        small = asyncio.ensure_future(cache.acquire("small", prompt(3, 1), wait_for_room=True))
        await (await small).finish()
        await lease.finish()


@pytest.mark.parametrize("tiers", TIERS, ids=["device", "host", "storage"])
@pytest.mark.parametrize("long", [False, True])
async def test_a_request_cancelled_at_any_step_leaves_nothing(tiers, long, monkeypatch):
    """It is cancelled after each number of turns of the loop, while its blocks are freed."""
    if long:
        monkeypatch.setattr(work, "TURN_BLOCKS", 2)
    for steps in range(14):
        async with opened(device=8, **tiers) as cache:
            await serve(cache, "before", prompt(101, 3))
            lease = await cache.acquire("runs", prompt(1, 6))
            await lease.wait_ready()  # the store is asked for its blocks
            one = await queued(cache, 1, 1, 5)
            behind = await queued(cache, 2, 2, 3)
            ends = asyncio.ensure_future(lease.finish(6 * BLOCK))
            for _ in range(steps):
                await asyncio.sleep(0)
            one.cancel()
            await asyncio.gather(one, return_exceptions=True)
            await ends
            if not one.cancelled():
                one.result().abandon()
            granted = await behind
            await granted.wait_ready()
            await granted.finish()
            assert waiting(cache) == 0
            await cache.wait_idle()  # blocks of the cancelled request may be on their way back
            await serve(cache, "all", prompt(5, 8))


@pytest.mark.parametrize("tiers", TIERS, ids=["device", "host", "storage"])
async def test_long_requests_wait_too(tiers, monkeypatch):
    """Matched and released in parts of two blocks."""
    monkeypatch.setattr(work, "TURN_BLOCKS", 2)
    async with opened(device=12, **tiers) as cache:
        await serve(cache, "before", prompt(7, 6))
        await cache.wait_idle()
        leases = [await cache.acquire(f"r{n}", prompt(n, 4)) for n in (1, 2)]
        monkeypatch.setattr(queue, "OVERTAKEN", 0)
        shared = asyncio.ensure_future(cache.acquire("w", prompt(7, 9), wait_for_room=True))
        while not waiting(cache):
            await asyncio.sleep(0)
        behind = await queued(cache, 2, 2, 4)
        for lease in leases:
            await cache.wait_idle()
            assert not shared.done() or lease is leases[1]
            assert shared.done() or not behind.done()
            await lease.finish()
        granted = await shared
        await granted.wait_ready()
        assert len(set(granted.block_table)) == 9
        await granted.finish()
        await (await behind).finish()
