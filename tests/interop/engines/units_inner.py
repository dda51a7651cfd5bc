"""Settings, host memory and the secondary tier, in vLLM's environment without an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    ReqContext,
    TierFilter,
    TierMatcher,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvactors.errors import StoreError
from kvactors.integrations.vllm import KVActorsOffloadingSpec
from kvactors.integrations.vllm.region import FOLDER

ROW = 4096
CONTEXT = ReqContext("request")


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[None]:
    """The configuration that `KVActorsConnector` gives to specs and tiers."""
    model = ModelConfig(os.environ["ENGINE_TEST_MODEL"])
    with set_current_vllm_config(VllmConfig(model_config=model)):
        yield


def config(**extra) -> OffloadingConfig:
    """vLLM's config of a model with blocks of 4096 bytes."""
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(32, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=ROW,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": 8 * ROW} | extra,
        engine_id=f"test-{os.getpid()}-{time.monotonic_ns()}",
        model=OffloadingModelConfig("tiny", "float32"),
        cache=OffloadingCacheConfig(32, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )


def keys(count: int, first: int = 0) -> list[bytes]:
    return [make_offload_key(bytes([first + i]) * 32, 0) for i in range(count)]


def test_a_folder_that_cannot_be_used_is_an_os_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    storage = {"backend": "file", "directory": str(tmp_path / "file" / "store")}
    spec = KVActorsOffloadingSpec(config(storage=storage))
    with pytest.raises(StoreError) as caught:
        spec.get_manager()
    assert isinstance(caught.value, OSError)
    assert not list(FOLDER.glob(f"*{spec.config.engine_id}*"))


def follow(name: str, path: list[bytes]) -> ReqContext:
    """A request whose chunks are those of `path`."""
    request = ReqContext(name)
    for i, key in enumerate(path):
        request.set_offload_key_position(key, 32 * (i + 1))
    return request


def test_a_chunk_is_evicted_before_the_one_that_it_follows() -> None:
    """vLLM passes the chunks of a path in several calls, and of several requests."""
    manager = KVActorsOffloadingSpec(config()).get_manager()
    path, other = keys(5), keys(8, first=100)
    first = follow("first", path[:4])
    for part in (path[:2], path[2:4]):
        manager.prepare_store(part, first)
        manager.complete_store(part, first)
    second = follow("second", path)
    assert {manager.lookup(key, second) for key in path[:4]} == {LookupResult.HIT}
    manager.prepare_load(path[:4], second)
    manager.complete_load(path[:4], second)
    manager.prepare_store(path[4:], second)
    manager.complete_store(path[4:], second)
    manager.on_schedule_end(None)
    evicted = manager.prepare_store(other, CONTEXT).evicted_keys
    assert evicted == path[::-1]
    manager.shutdown()


def test_a_request_of_before_a_reset_stores_nothing() -> None:
    manager = KVActorsOffloadingSpec(config()).get_manager()
    before, after, path = ReqContext("before"), ReqContext("after"), keys(2)
    manager.on_new_request(before)
    manager.reset_cache()
    manager.on_new_request(after)
    assert manager.prepare_store(path, before).keys_to_store == []
    assert manager.prepare_store(path, after).keys_to_store == path
    manager.shutdown()


def test_a_request_may_name_the_tiers_that_it_loads_from(tmp_path) -> None:
    storage = {"backend": "file", "directory": str(tmp_path), "capacity_blocks": 64}
    (key,) = keys(1)
    manager = KVActorsOffloadingSpec(config(storage=storage)).get_manager()
    manager.prepare_store([key], CONTEXT)
    manager.complete_store([key], CONTEXT)
    manager.shutdown()
    manager = KVActorsOffloadingSpec(config(storage=storage)).get_manager()
    on_host = TierFilter((TierMatcher(medium=Medium.CPU),))
    stored = TierFilter((TierMatcher(medium=Medium.STORAGE),))
    for _ in range(3):
        assert manager.lookup(key, ReqContext("a", load_tier_filter=on_host)) is LookupResult.MISS
        manager.on_schedule_end(None)
    either = ReqContext("b", load_tier_filter=stored)
    assert manager.lookup(key, either) is LookupResult.HIT_PENDING
    manager.shutdown()


# -- the secondary tier


class Rows:
    """The host tier of vLLM, and jobs of a tier below it."""

    def __init__(self, count: int = 8) -> None:
        self.view = memoryview(np.ones((count, ROW), np.uint8))
        self.jobs = 0

    def tier(self, directory, /, groups=None, **settings):
        entry = {
            "type": "KVActorsTier",
            "module_path": "kvactors.integrations.vllm",
            "directory": str(directory),
            "capacity_blocks": 64,
        }
        events = SimpleNamespace(enable_kv_cache_events=True)
        described = config() if groups is None else replace(config(), groups=groups)
        spec = SimpleNamespace(config=described, kv_events_config=events)
        return SecondaryTierFactory.create_secondary_tier(entry | settings, self.view, spec)

    def run(self, tier, wanted, chunks, *, load: bool):
        self.jobs += 1
        job = TransferJob(self.jobs, wanted, np.array(chunks), load, CONTEXT)
        (tier.submit_load if load else tier.submit_store)(job)
        tier.drain_jobs()
        (result,) = tier.get_finished_jobs()
        assert result.job_id == self.jobs
        return result


@pytest.fixture
def rows() -> Rows:
    return Rows()


def test_a_hybrid_model_has_a_tier_apart_from_those_of_its_groups(rows, tmp_path) -> None:
    two = (
        OffloadingGroupConfig(32, ("full.0",), 0),
        OffloadingGroupConfig(64, ("mamba.0", "mamba.1"), 1),
    )
    wanted = keys(2)
    tier = rows.tier(tmp_path, groups=two)
    rows.run(tier, wanted, [0, 1], load=False)
    tier.shutdown()
    for groups, found in ((two[:1], LookupResult.MISS), (two, LookupResult.HIT)):
        tier = rows.tier(tmp_path, groups=groups)
        assert {tier.lookup(key, CONTEXT) for key in wanted} == {found}
        tier.shutdown()


@pytest.mark.parametrize("load", [False, True])
def test_a_chunk_beyond_the_host_tier_fails_alone(rows, tmp_path, load) -> None:
    tier = rows.tier(tmp_path)
    wanted = keys(2)
    rows.run(tier, wanted, [0, 1], load=False)
    others = wanted if load else keys(2, first=10)
    result = rows.run(tier, others, [1, 8], load=load)
    assert not result.success
    assert tier.lookup(others[0], CONTEXT) is LookupResult.HIT
    tier.shutdown()


def test_a_small_tier_reports_the_chunks_that_it_removes(rows, tmp_path) -> None:
    tier = rows.tier(tmp_path, capacity_blocks=2, enable_kv_events=True)
    for i in range(4):
        assert rows.run(tier, keys(1, first=i), [i], load=False).success
    held = [key for key in keys(4) if tier.lookup(key, CONTEXT) is LookupResult.HIT]
    assert len(held) == 2
    events = list(tier.take_events())
    removed = {key for event in events if event.removed for key in event.keys}
    assert removed == set(keys(4)) - set(held)
    tier.shutdown()
