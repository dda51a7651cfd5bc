"""After a change of the namespace an index has exactly what requests of the new namespace can
get."""

from __future__ import annotations

import pytest

from kvactors.config import Config
from kvactors.flush_notifier.messages import BlocksRemoved
from kvactors.observe.statistics import announceable, residency
from kvactors.types import Reason, Tier
from tests.support.cache import opened, prompt, serve

SALTS = (None, "tenant-a")
FIRST = Config().cache.namespace


async def held(cache) -> int:
    """Number of blocks that the index has, on any tier. They must equal the announceable blocks."""
    await cache.wait_flushed(10)
    assert cache.count_divergent_blocks() == 0
    view = cache.sinks["memory"].view()
    assert {tier: set(keys) for tier, keys in view.items()} == announceable(cache.system)
    return len(set().union(*view.values()))


async def hits(cache, request: str, tokens) -> int:
    """Blocks that a request gets, all tiers."""
    async with await cache.acquire(request, tokens) as lease:
        await lease.wait_ready()
        return sum(lease.hits)


async def test_blocks_of_another_namespace_are_gone_for_indexes_and_come_back_with_it():
    async with opened(device=16, host={"slots": 16}) as cache:
        tokens = prompt(1, 4)
        for salt in SALTS:
            await serve(cache, f"first {salt}", tokens, salt=salt)
        before = await held(cache)
        assert before == 8
        await cache.set_namespace("weights-2")
        assert await held(cache) == 0
        assert len(set().union(*residency(cache.system).values())) == 8
        await serve(cache, "second", tokens)
        assert await held(cache) == 4
        await cache.set_namespace(FIRST)
        assert await held(cache) == 8
        assert await hits(cache, "third", [*tokens, 1]) == 4


async def test_a_lease_of_before_announces_nothing_that_no_request_can_get():
    async with opened(device=16, host={"slots": 8}) as cache:
        tokens = prompt(2, 4)
        lease = await cache.acquire("old", tokens)
        await lease.wait_ready()
        await cache.set_namespace("weights-2")
        await lease.commit(len(tokens))
        await lease.finish(computed_tokens=len(tokens))
        assert await held(cache) == 0
        await cache.set_namespace(FIRST)
        assert await held(cache) == 4


@pytest.mark.parametrize("namespace", [FIRST, "weights-2"])
async def test_a_restarted_notifier_announces_the_current_namespace(namespace):
    async with opened(device=16, host={"slots": 8}) as cache:
        await serve(cache, "old", prompt(3, 4))
        await cache.set_namespace("weights-2")
        await serve(cache, "new", prompt(3, 3))
        await cache.set_namespace(namespace)
        expected = 4 if namespace == FIRST else 3
        assert await held(cache) == expected
        cache.system.notifier_actor.ledger = None  # type: ignore[assignment]
        await cache.system.notifier.tell(BlocksRemoved(bytes(32), Tier.DEVICE, Reason.CLEAR))
        await cache.wait_idle()
        assert await held(cache) == expected


async def test_the_same_namespace_again_sends_nothing():
    async with opened(device=16, host={"slots": 8}) as cache:
        await serve(cache, "one", prompt(4, 4))
        await held(cache)
        sent = len(cache.sinks["memory"].tasks)
        await cache.set_namespace(cache.namespace)
        assert await held(cache) == 4
        assert len(cache.sinks["memory"].tasks) == sent
