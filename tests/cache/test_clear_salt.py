"""A clear of one salt takes several turns: requests, cancellations and other clears come between
them."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvactors.errors import NoRoom
from kvactors.native import BlockTree
from tests.cache.test_quotas import BLOCK, held, settle, tokens_of, use
from tests.support.cache import opened


class Steps:
    """A tree whose steps of a clear cover one block each."""

    def __init__(self, tree: BlockTree) -> None:
        self._tree = tree
        self.taken = 0

    def __getattr__(self, name):
        return getattr(self._tree, name)

    def forget_step(self, count, hashes):
        self.taken += 1
        return self._tree.forget_step(1, hashes)


async def begun(cache, salt="a"):
    """A clear that has taken its first turn, of many."""
    core = cache.system.index_actor
    core.index.turn_blocks, tree = 8, core.index.tree
    core.index.tree = steps = Steps(tree)
    task = asyncio.create_task(cache.clear(salt=salt))
    await asyncio.sleep(0)
    core.index.tree = tree
    assert steps.taken == 1
    assert not task.done()
    return task, steps


async def test_requests_of_the_salt_during_its_clear_are_cached_anew():
    async with opened(device=32) as cache:
        await use(cache, 1, salt="a", blocks=8)
        await use(cache, 2, salt="a", blocks=4)
        await use(cache, 3, salt="b", blocks=4)
        task, steps = await begun(cache)
        assert held(cache, 1, salt="a", blocks=8) == 0
        await use(cache, 1, salt="a", blocks=8)
        assert (await task).device_blocks == 12
        assert steps.taken > 2
        assert held(cache, 1, salt="a", blocks=8) == 8
        assert held(cache, 2, salt="a", blocks=4) == 0
        assert held(cache, 3, salt="b", blocks=4) == 4
        await settle(cache)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("host", [{}, {"slots": 8, "transit_slots": 8}])
async def test_blocks_of_a_clear_in_progress_are_taken_without_a_copy(wait, host):
    async with opened(device=8, host=host) as cache:
        await use(cache, 1, salt="a", blocks=8)
        task, _ = await begun(cache)
        lease = await cache.acquire("next", tokens_of(2, 6), salt="b", wait_for_evictions=wait)
        await task
        await lease.finish(6 * BLOCK)
        await cache.wait_idle()
        assert cache.statistics().prefix.offloads_in_flight == 0
        assert host == {} or cache.statistics().host.offloaded == 0
        await settle(cache)


async def test_a_clear_that_is_cancelled_goes_on():
    async with opened(device=16) as cache:
        await use(cache, 1, salt="a", blocks=8)
        lease = await cache.acquire("open", tokens_of(2, 4), salt="a")
        await lease.commit(4 * BLOCK)
        task, _ = await begun(cache)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await lease.finish()
        await settle(cache)
        assert cache.statistics().prefix.blocks_free == 16


@pytest.mark.parametrize("seed", range(6))
async def test_clears_between_requests_of_several_salts(seed):
    rng = random.Random(seed)
    host = {"slots": 6, "transit_slots": 6} if seed % 2 else {}
    async with opened(device=16, host=host, quota={"device": 6} if seed % 3 else {}) as cache:
        cache.system.index_actor.index.turn_blocks = 1
        open_, clears = [], []
        for _ in range(60):
            salt, kind = rng.choice("abc"), rng.random()
            if kind < 0.5:
                try:
                    lease = await cache.acquire("r", tokens_of(rng.randrange(6), 3), salt=salt)
                    await lease.wait_ready()
                except NoRoom:
                    continue
                open_.append(lease)
            elif kind < 0.8 and open_:
                lease = open_.pop(rng.randrange(len(open_)))
                await lease.finish(lease.num_tokens)
            elif kind < 0.95:
                clears.append(asyncio.create_task(cache.clear(salt=rng.choice([salt, None]))))
                await asyncio.sleep(0)
                if rng.random() < 0.3:
                    clears.pop().cancel()
        for lease in open_:
            await lease.finish(lease.num_tokens)
        await asyncio.gather(*clears)
        await settle(cache)


@pytest.mark.parametrize("whole", [True, False])
async def test_loads_of_a_request_that_waits_for_blocks_end_with_a_clear_of_its_salt(whole):
    """Its blocks would be on the device, and in no index."""
    host = {"slots": 8, "transit_slots": 8}
    store = {"backend": "memory", "write_policy": "write_through"}
    async with opened(device=8, host=host, storage=store) as cache:
        await use(cache, 1, salt="a", blocks=4)
        await cache.wait_idle()
        await cache.clear()
        await use(cache, 2, salt="b", blocks=8)
        await cache.wait_idle()
        asked = asyncio.create_task(cache.acquire("next", tokens_of(1, 5), salt="a"))
        await asyncio.sleep(0)
        assert cache.statistics().prefix.waiting == 1, "for evictions"
        await (cache.clear() if whole else cache.clear(salt="a"))
        lease = await asked
        await lease.wait_ready()
        await lease.commit(5 * BLOCK)
        await lease.finish()
        await settle(cache)
