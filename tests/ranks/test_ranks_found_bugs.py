"""Reduced cases of faults of ranks that once hung, failed an actor or kept lost blocks."""

from __future__ import annotations

import asyncio
import contextlib

import anyio
import pytest

import kvactors
from kvactors.settings import ActorsConfig, DeviceConfig
from kvactors.settings.ranks import RanksConfig
from kvactors.testing.loop import simulate
from tests.ranks.simulated import (
    BLOCK,
    ENDPOINT,
    all_there,
    at_rest,
    compute,
    led,
    load,
    prompt,
    serve,
    settings,
    stored,
    wrong,
)


@pytest.mark.parametrize("after", ["silent", "cut", "error"])
def test_closing_waits_for_no_silent_rank(after):
    async def main() -> None:
        config = settings(
            actors=ActorsConfig(drain_timeout_s=0.1), ranks=RanksConfig(2, ENDPOINT, timeout_s=2.0)
        )
        async with led(config) as (cache, ranks):
            await load(cache, ranks).run(60)
            ranks[0].gate.close()
            for family in range(8):
                with contextlib.suppress(kvactors.NoRoom):
                    (
                        await cache.acquire("last", prompt(family, 5), wait_for_evictions=False)
                    ).abandon()
            await asyncio.sleep(0.01)
            assert cache.system.ranks.statistics()[0].in_flight
            if after == "cut":
                asyncio.get_running_loop().call_later(0.5, ranks[0].cut)
            if after == "error":
                raise KeyError

    async def limited() -> None:
        try:
            with anyio.fail_after(60.0):
                await main()
        except KeyError:
            assert after == "error"

    simulate(limited, 1)


def test_blocks_computed_before_an_unseen_restart_of_a_rank_do_not_count():
    async def main() -> None:
        async with led(settings()) as (cache, ranks):
            await load(cache, ranks).run(10)
            await ranks[1].stop()
            await asyncio.sleep(1.0)
            ranks[1].gate.close()  # its Hello is in flight
            await ranks[1].start()
            await asyncio.sleep(1.0)
            lease = await cache.acquire("a", prompt(50, 3))
            await lease.wait_ready()
            compute(lease, ranks, 0, 3)
            await ranks[1].stop()
            await ranks[1].start()
            ranks[1].gate.open()
            await all_there(cache)
            with pytest.raises(kvactors.RankLost):
                await lease.commit(3 * BLOCK)
            await lease.finish()
            await at_rest(cache)

    simulate(main, 1)


def test_an_offload_pending_at_a_stopped_rank_leaves_other_blocks_usable():
    async def main() -> None:
        async with led(settings()) as (cache, ranks):
            for family in range(3):
                await serve(cache, ranks, prompt(family, 5, 0))
            await cache.wait_idle()
            ranks[0].gate.close()
            for family in range(10, 14):
                lease = await cache.acquire("x", prompt(family, 3), deadline=5.0)
                await lease.finish()
            assert asyncio.get_running_loop().time() < 2.0
            ranks[0].gate.open()
            await all_there(cache)
            await at_rest(cache)

    simulate(main, 1)


def test_a_block_that_leaves_later_than_its_parent_is_not_loaded():
    async def main() -> None:
        tiers = {
            "storage": stored(write_policy="write_back"),
            "device": DeviceConfig(num_blocks=16),
        }
        async with led(settings(**tiers)) as (cache, ranks):
            for family in (0, 1):
                await serve(cache, ranks, prompt(family, 6, 0))
            await cache.wait_idle()
            ranks[0].gate.close()
            asked = [asyncio.ensure_future(cache.acquire("x", prompt(10, 7, 0), deadline=60.0))]
            await asyncio.sleep(1.0)  # three of family 0 stay in flight
            asked.append(asyncio.ensure_future(cache.acquire("y", prompt(11, 3, 0), deadline=60.0)))
            await asyncio.sleep(1.0)  # those above them are gone
            for task in asked:
                await (await task).finish()
            lease = await cache.acquire("z", prompt(0, 6), deadline=60.0)
            ranks[0].gate.open()
            await lease.wait_ready()
            assert wrong(lease, ranks, lease.cached_tokens // BLOCK) == []
            await lease.finish()
            await all_there(cache)
            await at_rest(cache)
            assert cache.statistics().supervisor.failures == 0

    simulate(main, 1)
