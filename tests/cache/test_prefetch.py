"""Prefetch: storage's blocks come to the host tier before the request does."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

import kvactors
from kvactors.types import Tier
from tests.support.cache import opened, prompt, serve


def tiers(**storage):
    return {
        "device": 8,
        "host": {"slots": 16, "transit_slots": 16},
        "storage": {"backend": "memory", "write_policy": "write_through", **storage},
    }


async def stored(cache, *seeds, **scope) -> None:
    """Prompts of six blocks that are in storage alone."""
    for seed in seeds:
        await serve(cache, f"r{seed}", prompt(seed, 6, tail=1), **scope)
        await cache.wait_idle()
    await cache.clear()
    await cache.wait_idle()


async def test_prefetched_blocks_are_host_hits():
    async with opened(**tiers()) as cache:
        await stored(cache, 1, 2)
        assert await cache.prefetch(prompt(1, 6, tail=1)) == 6
        await cache.wait_idle()
        assert cache.statistics().host.fetched == 6
        assert len(cache.sinks["memory"].view()[Tier.HOST]) == 6, "the indexes hear of it"
        one, other = (
            await serve(cache, "a", prompt(1, 6, tail=1)),
            await serve(cache, "b", prompt(2, 6, tail=1)),
        )
        assert (one.hits, other.hits) == (kvactors.Hits(0, 6, 0), kvactors.Hits(0, 0, 6))


@pytest.mark.parametrize("salt", [None, "a"])
async def test_a_lookup_finds_no_prefetched_block_before_the_host_tier_has_handled_a_clear(salt):
    """A request behind the clear finds none."""
    async with opened(**tiers(exclusive=True)) as cache:
        tokens = await prefetched(cache, salt="a")
        with held_back(cache.system.evictor_actor):
            await cache.clear(salt=salt)
            assert cache.lookup(tokens, salt="a") == kvactors.Hits(0, 0, 0)
        await cache.wait_idle()
        assert cache.lookup(tokens, salt="a") == kvactors.Hits(0, 0, 0)


@pytest.mark.parametrize("clears", [1, 3])
async def test_a_clear_of_another_salt_on_its_way_hides_no_prefetched_block(clears):
    async with opened(**tiers(exclusive=True)) as cache:
        tokens = await prefetched(cache, salt="a")
        with held_back(cache.system.evictor_actor):
            for _ in range(clears):
                await cache.clear(salt="b")
                assert cache.lookup(tokens, salt="a").host == 6
            await cache.clear(salt="a")
            await cache.clear(salt="b")
            assert cache.lookup(tokens, salt="a") == kvactors.Hits(0, 0, 0)


async def prefetched(cache, **scope):
    """A prompt whose blocks are in the host tier."""
    tokens = prompt(1, 6, tail=1)
    await stored(cache, 1, **scope)
    await cache.prefetch(tokens, **scope)
    await cache.wait_idle()
    assert cache.lookup(tokens, **scope).host == 6
    return tokens


@contextmanager
def held_back(evictor):
    """Clears reach the host tier behind this block."""
    handle, later = evictor.memory.on_clear, []
    evictor.memory.on_clear = later.append
    try:
        yield
    finally:
        evictor.memory.on_clear = handle
        for message in later:
            handle(message)


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize("chunk", [None, 4])
async def test_a_lookup_and_a_chunked_request_find_prefetched_blocks(exclusive, chunk):
    """An exclusive store has them no more, and the index did not see them."""
    async with opened(**tiers(exclusive=exclusive)) as cache:
        await stored(cache, 1)
        tokens = prompt(1, 6, tail=1)
        await cache.prefetch(tokens[:13])
        await cache.wait_idle()
        assert cache.lookup(tokens) == kvactors.Hits(0, 3, 3)
        lease = await cache.acquire("a", tokens, chunk_tokens=chunk)
        await lease.wait_ready()
        assert lease.hits == kvactors.Hits(0, 3, 3)
        await lease.finish()


async def test_without_a_host_tier_or_storage_nothing_is_looked_up():
    stored_only = {"backend": "memory", "write_policy": "write_through"}
    for tables in ({"storage": stored_only}, {"host": {"slots": 4}}):
        async with opened(device=8, **tables) as cache:
            await serve(cache, "a", prompt(1, 6, tail=1))
            assert await cache.prefetch(prompt(1, 6, tail=1)) == 0
