"""After a change of the namespace an index has exactly what requests of the new namespace can
get."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kvactors
from kvactors.flush_notifier.deliver import SinkSet
from kvactors.flush_notifier.messages import BlocksRemoved
from kvactors.hints import Hints
from kvactors.observe.statistics import residency
from kvactors.settings import Config
from kvactors.types import Reason, Tier
from tests.support.announced import announceable
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
        return lease.hits.total


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


async def scoped_hits(cache, tokens, **scope) -> int:
    found = cache.lookup([*tokens, 1], **scope)
    async with await cache.acquire("again", [*tokens, 1], **scope) as lease:
        await lease.wait_ready()
        assert lease.hits == found
        return found.total


async def test_a_cleared_adapter_is_found_in_no_tier_and_others_are():
    store = {"backend": "memory", "write_policy": "write_through"}
    async with opened(device=12, host={"slots": 8, "transit_slots": 8}, storage=store) as cache:
        tokens = prompt(1, 4)
        scopes = [{}, {"lora": "b"}, {"lora": "a"}, {"lora": "a", "salt": "t"}, {"salt": "t"}]
        for scope in scopes:
            await serve(cache, f"{scope}", tokens, **scope)
        await cache.wait_idle()
        assert await held(cache) == 20
        assert (await cache.clear(lora="a")).device_blocks == 0
        assert cache.check() == []  # before the notifier is sent the clear
        assert await held(cache) == 12
        for scope in scopes:
            left = 0 if scope.get("lora") == "a" else 4
            assert await scoped_hits(cache, tokens, **scope) == left
        lease = await serve(cache, "new weights", tokens, lora="a")
        assert await scoped_hits(cache, tokens, lora="a") == 4
        assert lease.num_tokens == len(tokens)
        assert await held(cache) == 16


async def test_a_request_of_before_the_clear_of_its_adapter_is_not_shared():
    async with opened(device=16) as cache:
        tokens = prompt(1, 4)
        lease = await cache.acquire("old", tokens, lora="a")
        await cache.clear(lora="a")
        await lease.commit(len(tokens))
        await lease.finish()
        assert await held(cache) == 0
        assert await scoped_hits(cache, tokens, lora="a") == 0


async def test_a_clear_of_an_adapter_ends_its_pins():
    async with opened(device=16) as cache:
        for lora in ("a", "b"):
            lease = await cache.acquire("pinned", prompt(1, 2), lora=lora, hints=Hints(pin=True))
            await lease.finish(lease.num_tokens)
        await cache.clear(lora="a")
        assert await cache.unpin(prompt(1, 2), lora="b") == 2
        assert cache.statistics().prefix.pinned == 0
        lease = await cache.acquire("pinned", prompt(1, 2), lora="a", hints=Hints(pin=True))
        await cache.clear(lora="a")
        await lease.finish(lease.num_tokens)  # no request finds what it has computed
        assert lease.pinned_blocks == cache.statistics().prefix.pinned == 0


# -- a wait for sinks is not answered by a notifier that does not have the state yet


@pytest.mark.parametrize("at_rest", [True, False])
@pytest.mark.parametrize("device", [8, 64])
async def test_a_wait_after_a_restart_of_the_notifier_covers_what_was_held(
    monkeypatch, at_rest, device
):
    async with opened(device=device, host={"slots": 8, "transit_slots": 4}) as cache:
        for seed in range(3):
            await serve(cache, "r", prompt(seed, 5))
        await cache.wait_flushed()
        before = views(cache)
        assert before[Tier.DEVICE]
        whole, left = SinkSet.wait, [1]

        def failing(self: SinkSet, *arguments: Any) -> None:
            if left[0]:
                left[0] -= 1
                raise RuntimeError("a planted fault of the notifier")
            whole(self, *arguments)

        monkeypatch.setattr(SinkSet, "wait", failing)
        with pytest.raises(kvactors.ActorFailed):
            await cache.wait_flushed()
        while cache.system.notifier.incarnation == 0:
            await asyncio.sleep(0)
        await cache.wait_flushed(at_rest=at_rest)
        assert views(cache) == before
        assert cache.count_divergent_blocks() == 0
        await cache.wait_flushed(at_rest=False)


def views(cache: Any) -> dict[Tier, set[bytes]]:
    return {tier: set(some) for tier, some in cache.sinks["memory"].view().items()}
