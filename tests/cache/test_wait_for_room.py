"""`acquire(wait_for_room=True)`: first come, first served, until other requests release blocks."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors.prefix_index import waiting as queue
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
