"""The calls of FastDeploy's V1 scheduler: names of arguments, shapes of answers, recorded orders."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

from kvactors.integrations.fastdeploy import PrefixCacheManager
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request

ARGUMENTS = {
    "can_allocate_gpu_blocks": ["num_blocks", "try_free_gpu_blocks"],
    "allocate_gpu_blocks": ["num_blocks", "req_id"],
    "recycle_gpu_blocks": ["gpu_block_ids", "req_id"],
    "free_block_ids": ["need_block_num"],
    "request_match_blocks": ["task", "block_size", "args"],
    "get_required_block_num": ["input_token_num", "block_size"],
    "update_cache_blocks": ["task", "block_size", "num_computed_tokens"],
    "cache_output_blocks": ["task", "block_size"],
    "write_cache_to_storage": ["request"],
    "release_block_ids": ["task"],
    "update_cache_config": ["cache_config"],
    "reset": ["wait_for_tasks_done"],
    "launch_cache_manager": [
        "cache_config",
        "tensor_parallel_size",
        "device_ids",
        "pod_ip",
        "engine_worker_queue_port",
        "ipc_suffix",
        "create_cache_tensor",
    ],
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_call_has_fastdeploys_arguments(name):
    found = inspect.signature(getattr(PrefixCacheManager, name)).parameters
    assert [one for one in found if one != "self"] == ARGUMENTS[name]


def test_the_constructor_has_fastdeploys_arguments():
    found = list(inspect.signature(PrefixCacheManager).parameters.values())
    positional = [one.name for one in found if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == [
        "config",
        "tensor_parallel_size",
        "splitwise_role",
        "local_data_parallel_id",
    ]


@pytest.mark.parametrize("number", [3, 3.0, 2.5, np.int32(3), np.float64(2.2)])
def test_numbers_of_the_scheduler_are_accepted(engine, number):
    manager = engine(gpu=3).manager
    assert manager.can_allocate_gpu_blocks(number)
    assert not manager.can_allocate_gpu_blocks(number + 1)
    manager.free_block_ids(number)
    for none in (0, -1, np.int32(-3)):
        assert manager.can_allocate_gpu_blocks(none)
        assert manager.allocate_gpu_blocks(none, "a") == []


def test_blocks_come_back_as_list_array_or_number(engine):
    manager = engine(gpu=4).manager
    blocks = manager.allocate_gpu_blocks(4, "a")
    manager.recycle_gpu_blocks(blocks[0], "a")
    manager.recycle_gpu_blocks(np.int32(blocks[1]), "a")
    manager.recycle_gpu_blocks(np.array(blocks[2:3]), "a")
    manager.recycle_gpu_blocks(tuple(blocks[3:]))
    manager.recycle_gpu_blocks([], "a")
    assert list(manager.gpu_free_block_list) == [0, 1, 2, 3]


def test_a_match_gives_blocks_tokens_and_metrics(engine):
    one = engine(gpu=8)
    one.serve("a", list(range(8)))
    request = Request("b", list(range(10)))
    blocks, tokens, metrics = one.match(request)
    assert (blocks, tokens) == ([0, 1], 8)
    assert metrics == {
        "match_gpu_block_ids": [0, 1],
        "gpu_recv_block_ids": [],
        "match_storage_block_ids": [],
        "gpu_match_token_num": 8,
        "cpu_match_token_num": 0,
        "storage_match_token_num": 0,
        "cpu_cache_prepare_time": 0.0,
        "storage_cache_prepare_time": 0.0,
    }
    assert request.num_cached_blocks == 2
    blocks.append(99)  # the scheduler appends to the list
    metrics["gpu_match_token_num"] -= BLOCK_SIZE  # and corrects the metrics
    assert one.match(Request("c", list(range(10))))[0] == [0, 1]


def test_attributes_of_the_scheduler(engine):
    manager = engine(gpu=4, cpu=2).manager
    assert (manager.num_gpu_blocks, manager.num_cpu_blocks) == (4, 2)
    manager.allocate_gpu_blocks(1, "a")
    assert manager.available_gpu_resource == 0.75
    assert sorted(manager.gpu_free_block_list) == [1, 2, 3]
