"""FastDeploy's v1 `CacheController`: tensors, host buffers and copies of one worker."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from kvactors.errors import CacheClosed, DeadlineExceeded, DeviceError, LayoutError
from kvactors.integrations.fastdeploy import CacheController
from kvactors.tier_cache import CopyWorker
from tests.integrations.fastdeploy.attention import Attention
from tests.integrations.fastdeploy.config import BLOCK_SIZE, make_config
from tests.integrations.fastdeploy.oracle import ModelMemory

ALL = ("key_caches", "value_caches", "key_cache_scales", "value_cache_scales")


def made(cpu=4, *, roles=("key_caches", "value_caches"), layers=2, rank=0, ranks=1, **settings):
    config = make_config(6, cpu, layers=layers, ranks=ranks, **settings)
    memory = ModelMemory(6, BLOCK_SIZE, ranks=ranks, layers=layers + 1, roles=roles)
    worker = CacheController(config, rank, 3, environ={})
    return worker, Attention(memory, rank % ranks)


def copies(sources, targets):
    return SimpleNamespace(
        src_block_ids=sources, dst_block_ids=targets, success=False, error_message=None
    )


def filled(worker):
    for number, tensor in enumerate(worker.cache_kvs_map.values()):
        for block in range(6):
            tensor[block] = 10 * block + number


# -- tensors


@pytest.mark.parametrize(
    ("roles", "order"),
    [
        (("value_caches", "key_caches"), ["key_caches", "value_caches"]),
        (("key_caches",), ["key_caches"]),
        (("indexer_caches", "key_caches"), ["key_caches", "indexer_caches"]),
        (reversed(ALL), list(ALL)),
    ],
    ids=["GQA", "MLA", "DSA", "fp8"],
)
def test_the_flat_list_is_sorted_by_layer_and_role(roles, order):
    worker, backend = made(0, roles=tuple(roles))
    found = worker.initialize_kv_cache(backend, 6)
    names = [f"{stem}_{layer}_rank0.device3" for layer in range(2) for stem in order]
    assert set(worker.cache_kvs_map) == set(names)
    assert [id(one) for one in found] == [id(worker.cache_kvs_map[name]) for name in names]
    assert worker.get_kv_caches() is worker.cache_kvs_map


def test_layers_of_drafts_follow_the_main_layers_and_are_copied_too():
    worker, backend = made()
    worker.initialize_kv_cache(backend, 6)
    assert len(worker.initialize_mtp_kv_cache(backend, 6, 1, 2)) == 2
    assert "value_caches_2_rank0.device3" in worker.cache_kvs_map
    assert set(worker.host_cache_kvs_map) == set(worker.cache_kvs_map)
    assert worker.submit_swap_tasks(None, copies([0], [0])).get_num_layers() == 3
    assert worker.free_cache()


def test_names_have_the_rank_modulo_the_ranks():
    worker, backend = made(0, rank=5, ranks=2)
    worker.initialize_kv_cache(backend, 6)
    assert set(worker.cache_kvs_map) >= {"key_caches_0_rank1.device3"}


@pytest.mark.parametrize(
    ("quant", "dtype"), [(None, "bfloat16"), ("block_wise_fp8", "uint8"), ("int8", "uint8")]
)
def test_the_back_end_is_given_the_dtype_and_the_sizes(quant, dtype):
    config = make_config(6, 4)
    config.model_config.dtype = "bfloat16"
    config.quant_config = SimpleNamespace(kv_cache_quant_type=quant)
    worker = CacheController(config, 0, 0, environ={})
    backend = Attention(ModelMemory(6, BLOCK_SIZE))
    worker.initialize_kv_cache(backend, 6)
    device, host = backend.calls
    same = {"num_layers": 2, "kv_cache_quant_type": quant, "layer_offset": 0}
    assert device == same | {"num_blocks": 6, "cache_dtype": dtype}
    assert host == same | {"num_blocks": 4, "cache_item_bytes": 1}
    assert worker.free_cache()


def test_tensors_of_another_number_of_blocks_are_refused():
    worker, backend = made(0)
    with pytest.raises(LayoutError, match="2 layers from 0 of 5 blocks are needed"):
        worker.initialize_kv_cache(backend, 5)


def test_a_back_end_without_tensors_is_refused():
    worker, backend = made(0)
    backend.create_kv_cache = lambda **_: {}
    with pytest.raises(LayoutError, match="there are no cache tensors"):
        worker.initialize_kv_cache(backend, 6)


# -- host buffers


@pytest.mark.parametrize(
    "host",
    [
        None,
        {},
        {("key", 0): 1},
        RuntimeError("no allocator"),
        NotImplementedError("DSA"),
        ImportError("cuda_host_alloc"),
    ],
    ids=repr,
)
def test_a_back_end_without_host_cache_is_named(host):
    worker, backend = made()
    backend.host, backend.buffers[1] = host, None
    with pytest.raises(DeviceError, match="attention back end Attention has no host cache for lay"):
        worker.initialize_kv_cache(backend, 6)
    assert worker.host_cache_kvs_map == {}
    with pytest.raises(CacheClosed, match="no host buffers"):
        worker.submit_swap_tasks(copies([0], [0]), None)


def test_host_buffers_are_made_once_and_freed_once():
    worker, backend = made()
    worker.initialize_kv_cache(backend, 6)
    buffers = dict(worker.get_host_cache_kvs_map())
    assert set(buffers.values()) == set(backend.buffers)
    assert worker.initialize_host_cache(backend) == buffers
    worker.initialize_kv_cache(backend, 6)  # with the final number of blocks
    assert worker.host_cache_kvs_map == buffers
    assert worker.free_cache()
    assert (worker.cache_kvs_map, worker.host_cache_kvs_map, backend.buffers) == ({}, {}, {})
    assert worker.free_cache()
    assert sorted(backend.freed) == sorted(buffers.values())


def test_without_host_blocks_no_buffer_is_made():
    worker, backend = made(0)
    backend.host = RuntimeError("no allocator")
    worker.initialize_kv_cache(backend, 6)
    assert worker.host_cache_kvs_map == {}


# -- copies


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_blocks_go_to_the_host_and_come_back(policy):
    worker, backend = made(write_policy=policy)
    worker.initialize_kv_cache(backend, 6)
    filled(worker)
    evict, load = copies([0, 5], [3, 1]), copies([1, 3], [2, 4])
    counter = worker.submit_swap_tasks(evict, None)
    assert counter is None
    counter = worker.submit_swap_tasks(None, load)
    assert counter is worker.swap_layer_done_counter
    assert evict.success, "the next step waits for it"
    assert all(counter.wait_for_layer(layer) for layer in (0, 1))
    assert (counter.is_all_done(), counter.get_pending_layers()) == (True, [])
    for tensor in worker.cache_kvs_map.values():
        assert np.array_equal(tensor[2], tensor[5])
        assert np.array_equal(tensor[4], tensor[0])
    assert counter.wait_all()
    assert load.success
    assert worker.get_stats() == {"initialized": True, "num_layers": 2, "pending_evict_counters": 1}
    assert worker.reset_cache()
    assert worker.free_cache()


def test_write_back_loads_what_the_same_step_evicts():
    worker, backend = made(write_policy="write_back")
    worker.initialize_kv_cache(backend, 6)
    filled(worker)
    counter = worker.submit_swap_tasks(copies([1], [0]), copies([0], [2]))
    assert counter.wait_all()
    for tensor in worker.cache_kvs_map.values():
        assert np.array_equal(tensor[2], tensor[1])
    assert worker.free_cache()


def failing(jobs):
    good = CopyWorker.get_finished

    def get_finished(worker):
        return [one._replace(error="injected") if one.job in jobs else one for one in good(worker)]

    return mock.patch.object(CopyWorker, "get_finished", get_finished)


def test_a_failed_eviction_ends_the_next_step_and_a_failed_load_its_layer():
    worker, backend = made()
    worker.initialize_kv_cache(backend, 6)
    evict, load = copies([0], [0]), copies([0], [1])
    with failing({1, 2}):
        worker.submit_swap_tasks(evict, None)
        with pytest.raises(DeviceError, match="layer 0 not copied: injected"):
            worker.submit_swap_tasks(None, None)
        assert (evict.success, evict.error_message) == (False, "injected")
        counter = worker.submit_swap_tasks(None, load)
        with pytest.raises(DeviceError, match="layer 1 not copied: injected"):
            counter.wait_for_layer(1)
    worker.reset_cache()
    assert worker.submit_swap_tasks(None, copies([0], [1])).wait_all()
    assert worker.free_cache()


def test_a_layer_that_does_not_arrive_is_a_deadline():
    worker, backend = made()
    worker.initialize_kv_cache(backend, 6)
    counter = worker.submit_swap_tasks(None, copies([0], [1]))
    with mock.patch.object(CopyWorker, "wait", return_value=False):
        assert counter.get_pending_layers() == [0, 1]
        with pytest.raises(DeadlineExceeded, match=r"layer 0 not copied after 0\.5 s"):
            counter.wait_for_layer(0, 0.5)
    assert worker.free_cache()


def test_buffers_of_a_copy_that_does_not_end_are_not_freed():
    worker, backend = made()
    worker.initialize_kv_cache(backend, 6)
    worker.submit_swap_tasks(copies([0], [0]), None)
    with mock.patch.object(CopyWorker, "shutdown", return_value=False):
        assert not worker.free_cache()
    assert backend.buffers


@pytest.mark.parametrize(
    ("evict", "text"),
    [
        (([0, 1], [0]), "from 2 blocks to 1"),
        (([0], [9]), "slot id out of range"),
        (([7], [0]), "block id out of range"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(evict, text):
    worker, backend = made()
    worker.initialize_kv_cache(backend, 6)
    with pytest.raises(ValueError, match=text):
        worker.submit_swap_tasks(copies(*evict), None)
    assert worker.free_cache()
