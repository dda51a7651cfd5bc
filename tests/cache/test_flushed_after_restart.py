"""A wait for sinks is not answered by a notifier that does not have the state yet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kvactors
from kvactors import Tier
from kvactors.flush_notifier.deliver import SinkSet
from tests.support.cache import opened, prompt, serve


@pytest.mark.parametrize("at_rest", [True, False])
@pytest.mark.parametrize("device", [8, 64])
async def test_a_wait_after_a_restart_of_the_notifier_covers_what_was_held(
    monkeypatch, at_rest, device
):
    async with opened(device=device, host={"slots": 8, "transit_slots": 4}) as cache:
        for seed in range(3):
            await serve(cache, "r", prompt(seed, 5))
        await cache.wait_flushed()
        before = held(cache)
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
        assert held(cache) == before
        assert cache.count_divergent_blocks() == 0
        await cache.wait_flushed(at_rest=False)


def held(cache: Any) -> dict[Tier, set[bytes]]:
    return {tier: set(some) for tier, some in cache.sinks["memory"].view().items()}
