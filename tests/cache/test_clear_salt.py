"""A clear of one salt takes several turns: requests, cancellations and other clears come between
them."""

from __future__ import annotations

import asyncio

import pytest

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
