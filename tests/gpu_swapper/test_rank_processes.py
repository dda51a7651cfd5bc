"""Ranks in real processes: they are killed, stopped and cut off in the middle of their work."""

from __future__ import annotations

import asyncio

import anyio
import pytest

import kvactors
from kvactors.settings import LayoutConfig, StorageConfig
from kvactors.settings.ranks import RanksConfig
from tests.gpu_swapper.rank_processes import (
    BLOCK,
    HANG,
    IMPATIENT,
    at_rest,
    healthy,
    led,
    load,
    settings,
)
from tests.support.rank_process import SILENT

pytestmark = pytest.mark.timeout(3 * HANG)


def impatient(tmp_path, **over):
    """Settings with which a rank that is stopped falls silent soon. So may one that is slow:
    requests bear that."""
    return settings(
        tmp_path,
        ranks=RanksConfig(
            2, f"unix://{tmp_path}/ranks", timeout_s=IMPATIENT, startup_timeout_s=HANG
        ),
        **over,
    )


async def test_blocks_go_through_every_tier_of_every_rank(tmp_path):
    async with led(settings(tmp_path, 4)) as (cache, workers):
        engine = load(cache, workers)
        await engine.run(requests=150)
        await at_rest(cache)
        assert engine.totals.finished == 150
        assert engine.wrong == engine.broken == 0
        assert min(engine.hits) > 0, engine.hits
        assert [rank.health for rank in cache.system.ranks.statistics()] == ["healthy"] * 4


async def test_over_tcp(tmp_path, unused_tcp_port_factory):
    port = unused_tcp_port_factory()
    secret = "known to leader and ranks"
    config = settings(tmp_path, ranks=RanksConfig(2, f"tcp://127.0.0.1:{port}", 30.0, 60.0, secret))
    async with led(config) as (cache, workers):
        engine = load(cache, workers)
        await engine.run(requests=30)
        assert engine.totals.finished == 30
        assert engine.wrong == 0


@pytest.mark.parametrize("kind", ["file", pytest.param("object", marks=pytest.mark.full)])
async def test_the_store_outlives_leader_and_ranks(tmp_path, kind):
    shared = StorageConfig(backend="object", url=f"file://{tmp_path}", timeout_s=HANG)
    config = settings(tmp_path, **({} if kind == "file" else {"storage": shared}))
    prompts = [[f * 1000 + i for i in range(6 * BLOCK)] for f in range(16)]
    for life in range(2):
        async with led(config) as (cache, workers):
            engine = load(cache, workers)
            for prompt in prompts:
                await engine.serve(prompt)
            await at_rest(cache)
            assert engine.wrong == engine.broken == 0
            if life:
                assert engine.hits[2] > 0, "nothing came from the stores of the life before"


async def test_a_killed_rank_invalidates_its_blocks_and_is_admitted_again(tmp_path):
    async with led(settings(tmp_path)) as (cache, workers):
        engine = load(cache, workers)
        await engine.run(requests=40)
        prompt = [7] * (3 * BLOCK)
        await engine.serve(prompt)
        lease = await cache.acquire("holder", prompt)
        await workers[1].kill()
        while cache.system.ranks.statistics()[1].health != "away":
            await asyncio.sleep(0.01)
        with pytest.raises(kvactors.RankLost):
            await lease.commit(2 * BLOCK)
        with pytest.raises(kvactors.RankLost):
            await lease.extend([1] * BLOCK)
        await lease.finish()
        other = await cache.acquire("other", prompt)
        await other.wait_ready()
        assert other.cached_tokens == 0, "a rank is gone, and its share with it"
        await other.finish()
        await workers[1].start()
        await healthy(cache)
        served = engine.totals.finished
        await engine.run(requests=60)
        assert engine.totals.finished == served + 60
        assert engine.wrong == 0
        await at_rest(cache)


async def test_a_stopped_rank_holds_no_request(tmp_path):
    """Its loads become misses after ranks.timeout_s, not after the request's deadline: a request ends
    while the rank is still stopped."""
    async with led(impatient(tmp_path)) as (cache, workers):
        engine = load(cache, workers)
        await engine.run(requests=60)
        await healthy(cache)
        await workers[0].inject(SILENT)
        misses = requests = 0
        with anyio.fail_after(HANG / 2):  # half of the deadline of each request
            while not misses or cache.system.ranks.statistics()[0].health != "silent":
                requests += 1
                tokens = [requests % 12 * 1000 + i for i in range(6 * BLOCK)]
                try:
                    lease = await cache.acquire(f"s{requests}", tokens, wait_for_evictions=False)
                except kvactors.NoRoom:
                    continue  # it would need an eviction first, which needs the rank
                await lease.wait_ready()
                misses += lease.cached_tokens < 6 * BLOCK
                lease.abandon()
        await workers[0].recover(SILENT)
        await healthy(cache)
        await engine.run(requests=40)
        assert engine.wrong == 0
        await healthy(cache)
        await at_rest(cache)


async def test_ranks_that_do_not_fit_are_refused_by_name(tmp_path):
    config = settings(tmp_path, ranks=RanksConfig(2, f"unix://{tmp_path}/ranks", 0.3, 5.0))
    other = settings(
        tmp_path, layout=LayoutConfig(num_layers=3, num_kv_heads=4, head_dim=32, tensor_parallel=2)
    )
    from kvactors.device.host import HostDevice
    from kvactors.layout import make_layout

    device = HostDevice(make_layout(other.layout, BLOCK), 24)

    async def misfit() -> None:
        with pytest.raises(kvactors.RankError, match="layout"):
            await kvactors.serve_rank(config.ranks.endpoint, device, rank=0, ranks=2, config=other)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(misfit)
        with pytest.raises(kvactors.RankError, match=r"ranks \[0, 1\] of 2 .*layout"):
            async with kvactors.open(config):
                pass


async def test_each_rank_needs_its_own_number(tmp_path):
    from kvactors.device.host import HostDevice
    from kvactors.layout import make_layout

    config = settings(tmp_path)
    device = HostDevice(make_layout(config.layout, BLOCK), 24)
    with pytest.raises(kvactors.ConfigError, match="no rank 2 of 2"):
        await kvactors.serve_rank(config.ranks.endpoint, device, rank=2, ranks=2, config=config)
    with pytest.raises(kvactors.ConfigError, match="belong to the ranks"):
        async with kvactors.open(config, device):
            pass
