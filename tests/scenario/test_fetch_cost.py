"""Load or recompute, on whole caches in virtual time: what a slow store costs requests."""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvactors.decode_batch import Step
from kvactors.fetch_cost import TRIAL
from kvactors.opening import open_cache
from kvactors.scenario.engine import Engine
from kvactors.scenario.replay import (
    ReplayConfig,
    ReplaySettings,
    Serving,
    ServingFigures,
    cache_config,
    percentiles,
)
from kvactors.scenario.report import Totals
from kvactors.scenario.trace import read_trace
from kvactors.testing.loop import simulate
from kvactors.testing.sim import problems_at_rest
from tests.support import slow_store
from tests.support.cache import BLOCK, opened, prompt
from tests.support.traces import SHORT

SETTINGS = tomllib.loads(Path(slow_store.__file__).with_suffix(".toml").read_text())
STORE = SETTINGS["storage"]
PACE = msgspec.convert(SETTINGS["replay"] | {"speed": 1.0}, ReplaySettings)
NOISE = 1.05
"""A request that is late once changes which ones are computed together, and so their times."""


@cache
def replayed(
    prefill: float | None = None, *, stored: bool = True, link: tuple[float, float] = (0.02, 0.1)
) -> tuple[ServingFigures, Any]:
    """Replay requests of a conversation trace on a cache without a host tier. link: seconds of a
    read of the store, and of each of its blocks, which are computed in 5 ms."""
    cache_table = SETTINGS["cache"] | {"prefill_tokens_per_s": prefill}
    config = ReplayConfig.from_mapping(
        SETTINGS | {"cache": cache_table, "storage": STORE if stored else {}}
    )
    requests = list(read_trace(SHORT, limit=600))

    async def main() -> tuple[ServingFigures, Any]:
        totals = Totals()
        async with open_cache(cache_config(config), inline_copies=True) as cache:
            if cache.system.store is not None:
                store: Any = cache.system.store.inner
                store.latency_s, store.block_s = link
            figures = await Serving(Engine(cache, totals), requests, PACE).run()
            await cache.wait_idle(1e4)
            assert (totals.errors, totals.corrupt_blocks_served) == ([], 0)
            return figures, cache.statistics()

    return simulate(main, 1)


def first_tokens(*runs: ServingFigures) -> Iterator[list[float]]:
    """Times to the first token of each run, p50 and p90."""
    found = [percentiles(run.first_token_s) for run in runs]
    for share in ("p50", "p90"):
        yield [one[share] for one in found]


def test_a_slow_store_makes_no_first_token_late():
    figures, statistics = replayed()
    without, _ = replayed(stored=False)
    every, _ = replayed(0.0)
    for ours, bare, slow in first_tokens(figures, without, every):
        assert ours <= NOISE * bare < slow
    assert slow > 1.5 * bare
    assert statistics.host.not_fetched_slow > 100
    assert statistics.prefix.prefill_tokens_per_s == pytest.approx(100_000, rel=0.5)
    assert 1.0 < statistics.host.read_window_s < 32.0


def test_a_fast_store_is_used():
    figures, statistics = replayed(link=(0.001, 0.0005))
    without, _ = replayed(stored=False)
    assert statistics.prefix.storage_hits > 1500
    assert statistics.host.not_fetched_slow == 0
    for ours, bare in first_tokens(figures, without):
        assert ours < 0.9 * bare


def test_a_store_is_used_again_when_it_has_recovered():
    compute_s, blocks, waits, hits, promised = 0.24, 6, [], [], []

    async def serve(cache: Any, number: int) -> None:
        loop = asyncio.get_running_loop()
        began, tokens = loop.time(), prompt(number % 4, blocks, tail=1)
        promised.append(cache.lookup(tokens).total)
        lease = await cache.acquire(f"r{number}", tokens)
        await lease.wait_ready()
        waits.append(loop.time() - began)
        lacking = blocks - lease.cached_tokens // BLOCK
        hits.append(blocks - lacking)
        await asyncio.sleep(compute_s / blocks * lacking + 0.5)
        await lease.finish(computed_tokens=blocks * BLOCK)
        await cache.wait_idle()

    async def main() -> None:
        rate = blocks * BLOCK / compute_s
        tables: Any = {"storage": STORE, "cache": {"prefill_tokens_per_s": rate}}
        async with opened(inline=True, device=8, host={"transit_slots": 16}, **tables) as cache:
            store = cache.system.store.inner
            for latency, count in ((0.01, 20), (2.0, 80), (0.01, 4 * TRIAL)):
                store.latency_s, store.block_s = latency, 0.001
                for _ in range(count):
                    await serve(cache, len(waits))
            found = cache.statistics().host
            assert sum(hits) + found.not_fetched_slow == blocks * (len(hits) - 4)
            assert await problems_at_rest(cache, 10) == []

    simulate(main, 1)
    assert set(hits[4:20]) == {blocks}
    assert set(hits[20:100]) <= {0, 1}, "of the device"
    assert set(hits[100 + 3 * TRIAL :]) == {blocks}
    assert promised[4:20] + promised[21:100] == hits[4:20] + hits[21:100]
    assert promised[100 + 3 * TRIAL :] == hits[100 + 3 * TRIAL :]
    assert max(waits) <= compute_s * 1.001, "nothing waits longer than it would compute"
    assert sum(wait > 0.05 for wait in waits[20:100]) <= 80 / TRIAL + 1


@pytest.mark.parametrize(("given", "used"), [(None, 0.0), (7.0, 7.0)])
async def test_requests_of_the_past_measure_no_engine(given, used):
    """A sequential replay, whose clock is the trace's, gets the hits of an ideal engine."""
    cache_table = {} if given is None else {"prefill_tokens_per_s": given}
    storage = {"backend": "memory"}
    async with opened(clock=lambda: 0.0, storage=storage, cache=cache_table) as cache:
        assert cache.system.index_actor.prefill.tokens_per_s == used
        assert not cache.system.index_actor.prefill.measures


@pytest.mark.parametrize("by_step", [False, True])
def test_commits_of_prompts_measure_the_engine_and_decoded_tokens_do_not(by_step):
    """Chunks of two blocks, each of half a second, for two requests at a time."""

    async def main() -> float:
        storage = {"backend": "memory"}
        async with opened(inline=True, device=32, storage=storage) as cache:
            leases = [await cache.acquire(f"r{i}", prompt(i, 8)) for i in range(2)]
            async with await cache.acquire("left", prompt(2, 8)):
                assert len(cache.system.index_actor.leases.prefilling) == 3
            for done in (2, 4, 6, 8):
                await asyncio.sleep(0.5)
                if by_step:
                    await cache.step([Step(lease, (), done * BLOCK) for lease in leases])
                else:
                    for lease in leases:
                        await lease.commit(done * BLOCK)
            rate: float = cache.statistics().prefix.prefill_tokens_per_s
            for _ in range(BLOCK):
                await asyncio.sleep(5.0)
                steps = [Step(lease, (1,), lease.num_tokens + 1) for lease in leases]
                assert all(one.error is None for one in await cache.step(steps))
            assert cache.statistics().prefix.prefill_tokens_per_s == rate
            assert not cache.system.index_actor.leases.prefilling
            for lease in leases:
                await lease.finish()
            return rate

    assert simulate(main, 1) == pytest.approx(2 * 2 * BLOCK / 0.5, rel=0.05)
