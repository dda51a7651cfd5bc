"""AttentionStore with tensor-parallel ranks in real processes: each rank moves its own shard, the
leader alone reports to the index."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from msgspec.structs import replace

import kvactors
from kvactors.observe.statistics import residency
from kvactors.scenario.engine import Engine
from kvactors.scenario.report import Totals
from kvactors.settings import DeviceConfig, FlushConfig, HostConfig, StorageConfig
from kvactors.settings.ranks import RanksConfig
from kvactors.settings.sinks import AttentionStoreConfig, AttentionStoreSinkConfig
from tests.flush_notifier.helpers import path_tokens
from tests.gpu_swapper.rank_processes import BLOCK, HANG, PATIENT, led, load, settings
from tests.support import attentionstore_sdk as stand_in
from tests.support.rank_model import ProcessModel
from tests.support.rank_process import SILENT, RankProcess

STORE = AttentionStoreConfig(sdk="tests.support.attentionstore_sdk", ready_interval_s=0.05)
PROMPT = list(range(4 * BLOCK + 1))


@pytest.fixture(autouse=True)
def fresh_services():
    stand_in.reset()


def config(tmp_path, *, timeout_s: float = PATIENT, host: int = 0, blocks: int = 60, **over):
    return settings(
        tmp_path,
        device=DeviceConfig(num_blocks=blocks),  # writes that the service delays hold device blocks
        host=HostConfig(slots=host),
        storage=StorageConfig(
            backend="attention_store", write_policy="write_through", timeout_s=HANG
        ),
        ranks=RanksConfig(
            2, f"unix://{tmp_path}/ranks", timeout_s=timeout_s, startup_timeout_s=HANG
        ),
        attention_store=STORE,
        flush=FlushConfig(sinks=(AttentionStoreSinkConfig(),), timeout_s=HANG),
        **over,
    )


async def serve(cache, ranks, prompt=PROMPT, *, deadline: float | None = None) -> int:
    """One request, verified on every rank. Returns how many blocks came from storage."""
    totals = Totals()
    engine = Engine(cache, totals, ProcessModel(ranks), thorough=True)
    lease = await engine.serve("r", prompt, deadline=deadline)
    assert (totals.corrupt_blocks_served, totals.errors) == (0, [])
    return lease.cached_tokens // BLOCK if lease.hits.storage else 0


async def again(cache, ranks, prompt=PROMPT, **kwargs) -> int:
    """The same after the device has lost everything."""
    await cache.wait_idle(HANG)
    await cache.clear()
    return await serve(cache, ranks, prompt, **kwargs)


async def test_each_rank_moves_its_own_shard_and_the_leader_alone_reports(tmp_path):
    async with led(config(tmp_path)) as (cache, ranks):
        assert await serve(cache, ranks) == 0
        assert await again(cache, ranks) == 4
        for rank in ranks:
            state = await rank.service()
            assert (state.shards, state.shard, state.inits, state.flushes) == (1, rank.rank, 1, 0)
            assert state.objects == 4 * 2, "of each block a piece for each layer"
            assert state.reads
            assert state.writes
        await cache.wait_flushed(HANG)
        mine = stand_in.service()
        assert list(stand_in.services) == [("m", "default_pod_mixed_0", "v0", 0)]
        (shape,) = {call.arguments[0][3:5] for call in mine.calls if call.name == "init"}
        assert shape == (0, 2), "shard 0 of 2"
        assert {call.name for call in mine.calls} == {"init", "match", "flush_token_index"}
        assert len(mine.resident) == 4
        assert cache.check() == []


async def test_a_block_missing_on_one_rank_is_a_miss_for_all(tmp_path):
    async with led(config(tmp_path)) as (cache, ranks):
        await serve(cache, ranks)
        await cache.wait_idle(HANG)
        await ranks[1].service(capacity=2)
        other = [9] * len(PROMPT)
        await again(cache, ranks, other)
        found = await again(cache, ranks)
        assert found == 0, "the least recently used blocks are the first of the path"
        assert await again(cache, ranks) in (0, 2)
        await ranks[1].service(capacity=100)
        await again(cache, ranks)
        assert await again(cache, ranks) == 4
        assert cache.check() == []


@pytest.mark.parametrize("knobs", [{"broken": "no licence"}, {"refuse_block": 2}])
async def test_a_rank_whose_service_fails_costs_misses_and_is_shown(tmp_path, knobs):
    async with led(config(tmp_path)) as (cache, ranks):
        await serve(cache, ranks)
        await cache.wait_idle(HANG)
        await ranks[1].service(**knobs)
        for _ in range(8):
            await again(cache, ranks)
        if "broken" in knobs:
            assert cache.statistics().store.unavailable
            assert cache.health().status == "degraded"
        await ranks[1].service(broken="", refuse_block=-1)
        for _ in range(400):
            if await again(cache, ranks) == 4 and cache.health().status == "ok":
                break
            await asyncio.sleep(0.05)
        else:
            pytest.fail(f"the store is not used again: {cache.health()}")


async def test_a_store_that_is_slow_on_one_rank_makes_no_rank_silent(tmp_path):
    async with led(config(tmp_path, timeout_s=0.3, host=12)) as (cache, ranks):
        await serve(cache, ranks)
        await cache.wait_idle(HANG)
        await ranks[1].service(stuck=1.5)
        assert await again(cache, ranks, deadline=0.5) == 0, (
            "the request does not wait beyond its deadline"
        )
        for seed in range(4):  # copies between device and host go on
            await serve(cache, ranks, [100 + seed] * (6 * BLOCK + 1), deadline=0.5)
        assert [rank.silences for rank in cache.system.ranks.statistics()] == [0, 0]
        await ranks[1].service(stuck=0.0)
        await cache.wait_idle(HANG)
        assert cache.check() == []


async def test_a_rank_that_stops_during_a_move_is_silent_and_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr("kvactors.data_plane.ranks.leader.PING_LIMIT", 0.3)
    async with led(config(tmp_path, timeout_s=0.3)) as (cache, ranks):
        await serve(cache, ranks)
        await cache.wait_idle(HANG)
        await cache.clear()
        await ranks[1].inject(SILENT)
        async with await cache.acquire("r", PROMPT, deadline=HANG) as lease:
            while not cache.system.ranks.statistics()[1].silences:
                await asyncio.sleep(0.02)
            await ranks[1].recover(SILENT)
            await lease.wait_ready(deadline=HANG)
            assert lease.cached_tokens in (0, 4 * BLOCK)
        assert await again(cache, ranks) in (0, 4)
        assert cache.check() == []


async def test_a_rank_that_is_killed_comes_back_with_an_empty_shard_and_no_byte_is_wrong(tmp_path):
    async with led(config(tmp_path)) as (cache, ranks):
        engine = load(cache, ranks)
        await engine.run(requests=20)
        await ranks[1].kill()
        await ranks[1].start()
        while cache.health().status != "ok":
            await asyncio.sleep(0.05)
        await engine.run(requests=20)
        assert engine.wrong == 0
        assert await again(cache, ranks, [77] * len(PROMPT)) == 0
        assert await again(cache, ranks, [77] * len(PROMPT)) == 4
        await cache.wait_flushed(HANG)
        assert (cache.count_divergent_blocks(), cache.check()) == (0, [])


async def test_ranks_that_name_another_version_are_refused(tmp_path):
    leader = config(tmp_path)
    leader = replace(leader, ranks=replace(leader.ranks, startup_timeout_s=10.0))
    ranks = [
        RankProcess(leader, 0),
        RankProcess(
            replace(leader, attention_store=replace(STORE, namespace="m", model_version="v9")), 1
        ),
    ]
    try:
        for rank in ranks:
            await rank.start()
        with pytest.raises(
            kvactors.RankError,
            match="storage namespace 'm/default_pod_mixed_0/v9', the leader has "
            "'m/default_pod_mixed_0/v0'",
        ):
            async with kvactors.open(leader):
                pass
    finally:
        for rank in ranks:
            await rank.kill()


async def test_an_engine_with_many_requests(tmp_path):
    async with led(config(tmp_path, host=12, blocks=200)) as (
        cache,
        ranks,
    ):  # enough blocks for every request, although others wait to be saved
        engine = load(cache, ranks)
        for _ in range(3):
            await engine.run(requests=30)
            await cache.wait_idle(HANG)
            await cache.clear()
        await engine.run(requests=30)
        assert (engine.wrong, engine.broken) == (0, 0)
        assert engine.hits[2] > 0
        await cache.wait_flushed(HANG)
        assert (cache.count_divergent_blocks(), cache.check()) == (0, [])
        ledger = cache.system.notifier_actor.ledger
        held = residency(cache.system)
        keys = held[kvactors.Tier.DEVICE] | held[kvactors.Tier.HOST]
        paths = {
            tuple(np.frombuffer(path_tokens(ledger, key), "<u4").tolist())
            for key in keys
            if ledger.tree.finished[ledger.tree.find(key)]
        }
        assert stand_in.service().resident == paths
