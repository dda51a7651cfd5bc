"""Metrics under FastDeploy's names."""

from __future__ import annotations

import pytest

from tests.integrations.fastdeploy.config import Request

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest

from kvactors.integrations.fastdeploy.metrics import FastDeployMetrics
from kvactors.observe.metrics import FASTDEPLOY_FAMILIES

A = list(range(8))


def sample(one, name):
    registry = CollectorRegistry()
    registry.register(FastDeployMetrics(one.manager))
    return registry.get_sample_value(f"fastdeploy:{name}")


def test_every_name_of_fastdeploys_manager_is_there(engine):
    one = engine(gpu=4)
    registry = CollectorRegistry()
    registry.register(FastDeployMetrics(one.manager))
    text = generate_latest(registry).decode()
    for family in FASTDEPLOY_FAMILIES:
        assert f"\nfastdeploy:{family.name}" in f"\n{text}", family.name
    assert "fastdeploy:cache_config_info{" in text
    assert 'block_size="4"' in text


def test_values_follow_requests(engine):
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    one.manager.free_block_ids(1)
    one.match(Request("b", A))
    assert sample(one, "hit_req_rate") == 0.5
    assert sample(one, "hit_token_rate") == 0.5
    assert sample(one, "gpu_hit_token_rate") == 0.25
    assert sample(one, "cpu_hit_token_rate") == 0.25
    assert sample(one, "prefix_cache_token_num_total") == 8
    assert sample(one, "prefix_gpu_cache_token_num_total") == 4
    assert sample(one, "prefix_cpu_cache_token_num_total") == 4
    assert sample(one, "prefix_ssd_cache_token_num_total") == 0
    assert sample(one, "free_gpu_block_num") == 2
    assert sample(one, "available_gpu_block_num") == 2
    assert sample(one, "max_gpu_block_num") == 4
    assert sample(one, "max_cpu_block_num") == 2
    assert sample(one, "available_gpu_resource") == 0.5
    assert sample(one, "gpu_cache_usage_perc") == 0.5


def test_storage_hits_are_counted(engine):
    one = engine(gpu=4, file=True)
    one.serve("a", A)
    one.manager.reset()
    one.serve("b", A)
    assert sample(one, "prefix_ssd_cache_token_num_total") == 8
