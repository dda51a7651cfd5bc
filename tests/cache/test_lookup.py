"""Look-ups: they find what an acquire would find, by tier, and change nothing."""

from __future__ import annotations

from kvactors.lease import Hits
from kvactors.storage.attempts import Attempts
from tests.support.cache import BLOCK, opened, prompt, serve

HOST = {"slots": 8, "transit_slots": 16}
STORE = {"backend": "memory", "write_policy": "write_through"}


async def fill_tiers(cache):
    """A prompt with blocks on the device, in host memory and in the store. Returns it."""
    tokens = prompt(1, 6, tail=1)
    await serve(cache, "first", tokens)
    await cache.wait_idle()
    return tokens


async def test_hits_by_tier_are_those_of_an_acquire():
    """The blocks of a prompt move down tier by tier as other prompts come. At each step the look-up
    equals the hits of the lease that is acquired next."""
    seen = set()
    for others in range(5):
        async with opened(device=8, host={**HOST, "slots": 4}, storage=STORE) as cache:
            tokens = await fill_tiers(cache)
            for other in range(others):
                await serve(cache, "other", prompt(10 + other, 4))
                await cache.wait_idle()
            hits = cache.lookup(tokens)
            assert await cache.lookup_slices(tokens) == hits
            lease = await cache.acquire("again", tokens)
            await lease.wait_ready()
            assert hits == lease.hits
            assert hits.total == lease.cached_tokens // BLOCK
            seen.update(name for name, count in zip(hits._fields, hits, strict=True) if count)
            await lease.finish()
    assert seen == {"device", "host", "storage"}


async def test_hits_in_tokens_and_the_blocks_that_a_prompt_needs():
    async with opened(device=16) as cache:
        await serve(cache, "first", prompt(1, 3))
        hits = cache.lookup(prompt(1, 3) + prompt(2, 2, tail=1))
        assert (hits, hits.tokens) == (Hits(3, 0, 0), Hits(3 * BLOCK, 0, 0))
        assert hits.cached_tokens == 3 * BLOCK
        assert (hits.num_tokens, hits.block_size) == (5 * BLOCK + 1, BLOCK)
        assert hits.new_blocks == 3
        before = cache.free_blocks()
        lease = await cache.acquire("r", prompt(1, 3) + prompt(2, 2, tail=1))
        assert cache.free_blocks().available == before.available - hits.new_blocks - hits.device
        await lease.finish()


async def test_a_lookup_takes_and_touches_nothing():
    """The block that was used least recently is evicted first, however often it was looked up."""
    old, new = prompt(1, 2), prompt(2, 2)
    async with opened(device=4) as cache:
        await serve(cache, "old", old)
        await serve(cache, "new", new)
        before = cache.statistics().prefix
        for _ in range(3):
            assert cache.lookup(old).device == 1
        assert cache.statistics().prefix == before
        await serve(cache, "third", prompt(3, 2))
        assert (cache.lookup(old).device, cache.lookup(new).device) == (0, 1)


async def test_blocks_of_a_store_that_fails_are_not_hits(monkeypatch):
    def broken(key):
        raise RuntimeError("broken")

    tokens = prompt(1, 3, tail=1)
    async with opened(device=4, storage=STORE) as cache:
        await serve(cache, "first", tokens)
        await cache.wait_idle()
        await serve(cache, "other", prompt(2, 4))
        await cache.wait_idle()
        assert cache.lookup(tokens).storage == 3
        with monkeypatch.context() as patched:
            patched.setattr(cache.system.store.inner, "holds", broken)
            assert cache.lookup(tokens).storage == 0
        with monkeypatch.context() as patched:
            patched.setattr(Attempts, "paused", True)
            assert cache.lookup(tokens).storage == 0
        assert cache.lookup(tokens).storage == 3


async def test_free_blocks_adds_up():
    async with opened(device=8, host=HOST) as cache:
        assert cache.free_blocks() == (8, 8, 0, 0, 0)
        lease = await cache.acquire("r", prompt(1, 3))
        assert cache.free_blocks() == (8, 5, 0, 0, 0)
        await lease.finish(3 * BLOCK)
        assert cache.free_blocks() == (8, 5, 3, 0, 0)
        assert cache.free_blocks().available == 8
