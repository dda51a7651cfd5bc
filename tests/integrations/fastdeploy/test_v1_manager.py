"""FastDeploy's v1 cache manager: `CacheManager`, and the scheduler's model in v1 mode over it."""

from __future__ import annotations

import inspect
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvactors.errors import ConfigError
from kvactors.integrations.fastdeploy import CacheController, CacheManager, PrefixCacheManager
from tests.integrations.fastdeploy.attention import Attention
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request, make_config
from tests.integrations.fastdeploy.conftest import memory_of_gpu
from tests.integrations.fastdeploy.invariants import check
from tests.integrations.fastdeploy.oracle import ModelMemory
from tests.integrations.fastdeploy.scheduler import V1Scheduler
from tests.integrations.fastdeploy.simulation import KINDS, V1Simulation, simulate
from tests.support import attentionstore_sdk as stand_in

LIMIT = 30.0
A, B, C = list(range(8)), list(range(100, 108)), list(range(200, 208))
LAYOUT = {"kind": "gqa", "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"}


class Engine:
    """A manager, its workers, and the scheduler's model."""

    def __init__(self, gpu=8, cpu=0, *, ranks=1, environ=None, options=None, **settings):
        config = make_config(gpu, cpu, ranks=ranks, **settings)
        self.memory = ModelMemory(gpu, BLOCK_SIZE, ranks=ranks)
        given = {"options": options, "environ": environ or {}}
        self.manager = CacheManager(config, **given)
        self.workers = [CacheController(config, one, one, **given) for one in range(ranks)]
        for rank, worker in enumerate(self.workers):
            worker.initialize_kv_cache(Attention(self.memory, rank), gpu)
        self.scheduler = V1Scheduler(self.manager, self.memory, config, self.workers)

    def serve(self, name, prompt, tokens=1):
        """A whole request. Returns the blocks that its match has found, on device and host."""
        self.scheduler.add(Request(name, prompt), tokens)
        self.scheduler.run()
        check(self.manager)
        assert self.scheduler.wrong == []
        found = self.scheduler.hits[-1][2]
        levels = ("gpu_match_token_num", "cpu_match_token_num")
        return tuple(found[one] // BLOCK_SIZE for one in levels)

    def close(self):
        self.manager.close()
        assert all(worker.free_cache() for worker in self.workers)


@pytest.fixture
def engine():
    made = []

    def make(*arguments, **settings):
        made.append(Engine(*arguments, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("seed", range(12))
def test_drawn_runs_have_no_wrong_bytes_and_lose_no_blocks(seed):
    backend = {"backend": "mooncake", "cpu": 4, "blocks": 8} if seed % 2 else {}
    simulate(random.Random(seed), requests=20, kind=V1Simulation, **backend)


@pytest.mark.parametrize("given", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_tensors_of_every_kind(given, policy):
    sizes = {"blocks": 8, "cpu": 6, "size": 4, "drafts": 0, "policy": policy, "threshold": 1}
    sizes["backend"] = None if "make_memory" in given else "mooncake"  # the layout has one shape
    found = simulate(random.Random(1), requests=40, kind=V1Simulation, **sizes | given)
    assert found.hits["cpu"] > 0


@pytest.mark.parametrize("seed", [1, 4])
def test_tensors_of_a_gpu_are_copied_after_the_stream(gpu, seed):
    sizes = {"blocks": 8, "cpu": 6, "size": 4, "drafts": 0, "policy": "write_back"}
    given = {"make_memory": memory_of_gpu(gpu), "stream": lambda: 0, "threshold": 1}
    found = simulate(random.Random(seed), requests=40, kind=V1Simulation, **sizes | given)
    assert found.hits["cpu"] > 0


# -- policies


def test_a_finished_request_is_backed_up_and_comes_back_from_the_host(engine):
    one = engine(3, 4)
    assert one.serve("a", A) == (0, 0)
    one.serve("b", B[:4])  # the batch of this step carries the copies of a
    assert one.scheduler.batch_log["evict"] == 2
    one.serve("c", C)
    one.serve("d", B)
    found = one.serve("e", [*A, 9])
    assert found[1] > 0, "nothing of a was loaded from the host"


def test_blocks_are_backed_up_once_they_were_used_often_enough(engine):
    one = engine(8, 8, write_policy="write_through_selective", write_through_threshold=2)
    one.serve("a", A)
    one.serve("b", B[:3])
    assert one.scheduler.batch_log["evict"] == 0
    assert one.serve("c", [*A, 9]) == (2, 0)
    one.serve("d", B[:3])
    assert one.scheduler.batch_log["evict"] == 2


def test_write_back_copies_blocks_when_they_are_evicted(engine):
    one = engine(3, 4, write_policy="write_back")
    one.serve("a", A)
    assert one.manager.issue_pending_backup_to_batch_request() is None
    assert one.scheduler.batch_log["evict"] == 0
    one.serve("b", B)
    assert one.scheduler.batch_log["evict"] > 0
    assert sum(one.serve("c", [*A, 9])) == 2


def test_blocks_that_this_step_computes_are_not_backed_up(engine):
    """The copies of a step come before its computation."""
    one = engine(8, 8)
    manager, first, second = one.manager, Request("a", [*A, 9]), Request("b", [*A, 10])
    manager.match_prefix(first)
    first.block_tables = manager.allocate_gpu_blocks(first, 3)
    first.prefill_end_index = 9
    manager.match_prefix(second)
    second.block_tables = list(second.match_result.device_block_ids)
    assert second.match_result.total_matched_blocks == 2
    manager.request_finish(second)
    assert manager.issue_pending_backup_to_batch_request() is None
    manager.check_and_add_pending_backup()
    manager.request_finish(first)
    backup = manager.issue_pending_backup_to_batch_request()
    assert backup.src_block_ids == [0, 1]
    assert len(backup.hash_values) == len(backup.dst_block_ids) == 2
    manager.check_and_add_pending_backup()
    check(manager)


def test_a_request_that_is_preempted_in_its_step_keeps_its_blocks_until_the_end(engine):
    one = engine(2, 4, write_policy="write_back")
    manager, request, other = one.manager, Request("a", A), Request("b", B)
    manager.match_prefix(request)
    request.block_tables = manager.allocate_gpu_blocks(request, 2)
    request.prefill_end_index = 8
    manager.match_prefix(other)
    manager.request_finish(request)
    assert not manager.can_allocate_gpu_blocks(1), "its blocks are computed after the copies"
    manager.check_and_add_pending_backup()
    assert manager.can_allocate_gpu_blocks(2)
    assert len(manager.allocate_gpu_blocks(other, 2)) == 2
    assert other.cache_evict_metadata[0].src_block_ids == [0, 1]


def test_a_host_block_of_this_steps_copies_is_not_taken_again(engine):
    one = engine(4, 1, write_policy="write_back")
    one.serve("a", [*A, *B])
    manager, requests = one.manager, [Request(name, C) for name in "bc"]
    for request in requests:
        manager.match_prefix(request)
        assert len(manager.allocate_gpu_blocks(request, 1)) == 1
    (evicted,) = requests[0].cache_evict_metadata
    assert (evicted.src_block_ids, evicted.dst_block_ids) == ([3], [0])
    assert requests[1].cache_evict_metadata == [], "the only host block is in use"
    manager.match_prefix(again := Request("d", [*A, *B]))
    assert again.match_result.matched_host_nums == 0, "its copy is not made yet"
    for request in (*requests, again):
        manager.request_finish(request)
    manager.check_and_add_pending_backup()
    check(manager)


def test_a_host_block_that_this_step_loads_is_not_overwritten(engine):
    one = engine(4, 1, write_policy="write_back")
    one.serve("a", A[:4])
    one.serve("b", [*C, *B])  # evicts a
    manager, first, second = one.manager, Request("c", [*A[:4], 9]), Request("d", [*B, 9])
    manager.match_prefix(first)
    assert first.match_result.matched_host_nums == 1
    first.block_tables = manager.allocate_gpu_blocks(first, 1)
    assert first.cache_swap_metadata[0].src_block_ids == [0]
    manager.match_prefix(second)
    assert len(manager.allocate_gpu_blocks(second, 2)) == 2
    assert [*first.cache_evict_metadata, *second.cache_evict_metadata] == []
    manager.request_finish(first)
    manager.request_finish(second)
    manager.check_and_add_pending_backup()
    check(manager)


def test_a_partial_block_and_the_last_token_are_not_indexed(engine):
    one = engine(8)
    manager, request = one.manager, Request("a", A)
    manager.match_prefix(request)
    request.block_tables = manager.allocate_gpu_blocks(request, 2)
    request.prefill_end_index = 6  # a chunk that ends within a block
    manager.match_prefix(again := Request("b", [*A, 9]))
    assert again.match_result.matched_device_nums == 1
    request.prefill_end_index = 8
    request.output_token_ids = [1, 2, 3, 4]  # the last one was no input
    request.block_tables += manager.allocate_gpu_blocks(request, 1)
    manager.request_finish(request)
    manager.match_prefix(again := Request("b", [*A, 1, 2, 3, 4, 5]))
    assert again.match_result.matched_device_nums == 2


def test_fewer_blocks_than_host_hits_load_as_many(engine):
    one = engine(3, 4)
    one.serve("a", A)
    one.serve("b", B[:3])
    one.serve("c", [*C, 1])
    manager, request = one.manager, Request("d", [*A, 9])
    manager.match_prefix(request)
    hits = request.match_result
    assert hits.matched_host_nums == 2
    blocks = manager.allocate_gpu_blocks(request, 1)
    assert request.cache_swap_metadata[0].dst_block_ids == blocks
    request.block_tables = [*hits.device_block_ids, *blocks]
    manager.request_finish(request)
    manager.check_and_add_pending_backup()
    check(manager)


def test_blocks_that_do_not_fit_are_an_empty_list(engine):
    manager = engine(2).manager
    request = Request("a", A)
    manager.match_prefix(request)
    assert manager.allocate_device_blocks(request, 3) == []
    assert manager.num_free_device_blocks == 2


def test_without_prefix_caching_requests_hold_their_own_blocks(engine):
    one = engine(4, enable_prefix_caching=False)
    assert one.serve("a", A) == (0, 0)
    assert one.serve("b", A) == (0, 0)
    assert one.manager.num_free_device_blocks == 4


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("block_tables", [5, 5]),
        ("block_tables", [7, 6]),
        ("output_token_ids", [-1]),
        ("prefill_end_index", "8"),
        ("prompt_token_ids", [1]),
    ],
)
def test_a_request_that_is_malformed_costs_no_other_one_and_no_block(engine, name, value):
    one = engine(4)
    manager, bad, good = one.manager, Request("bad", A), Request("good", B)
    manager.match_prefix(bad)
    blocks = bad.block_tables = manager.allocate_gpu_blocks(bad, 2)
    bad.prefill_end_index = 8
    before = getattr(bad, name)
    setattr(bad, name, value)
    manager.match_prefix(good)
    assert good.match_result.total_matched_blocks == 0
    setattr(bad, name, before)
    bad.block_tables = blocks
    manager.request_finish(bad)
    manager.request_finish(good)
    manager.check_and_add_pending_backup()
    check(manager)
    assert manager.can_allocate_gpu_blocks(4)


def test_a_reset_empties_everything(engine):
    one = engine(4, 4)
    one.serve("a", A)
    one.serve("b", B[:3])
    request = Request("c", [*A, 9])
    one.manager.match_prefix(request)
    assert one.manager.reset_cache()
    one.manager.request_finish(request)  # of before
    assert one.manager.num_free_device_blocks == 4
    assert one.serve("d", [*A, 9]) == (0, 0)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_table_of_an_array_is_taken_back_as_integers(engine, prefix_caching):
    """numpy's integers would be in the next tables and in the copies that workers are sent."""
    one = engine(4, 4, enable_prefix_caching=prefix_caching)
    request = Request("a", A)
    one.manager.match_prefix(request)
    table = one.manager.allocate_gpu_blocks(request, 3)
    for wrong in (None, ["x"], [[0]], [1.0]):
        request.block_tables = wrong
        with pytest.raises(TypeError, match=r"block_tables of request 'a'|a block id must be"):
            one.manager.request_finish(request)
    request.block_tables = np.array(table)
    one.manager.request_finish(request)
    one.manager.check_and_add_pending_backup()
    assert {type(block) for block in one.manager.gpu_free_block_list} == {int}
    assert one.manager.num_free_device_blocks == 4


def test_a_table_with_a_block_twice_is_taken_back_once(engine):
    one = engine(4)
    request = Request("a", A)
    one.manager.match_prefix(request)
    request.block_tables = 2 * one.manager.allocate_gpu_blocks(request, 2)
    one.manager.request_finish(request)
    one.manager.check_and_add_pending_backup()
    check(one.manager)
    assert one.manager.num_free_device_blocks == 4


def test_new_weights_between_a_match_and_its_loads(engine, tmp_path):
    """The request goes on with the weights of before, and leaves nothing."""
    version = tmp_path / "version.yaml"
    version.write_text("version: RL-STEP01-x", "utf-8")
    one = engine(3, 4, model=str(tmp_path))
    for name, prompt in (("a", A), ("b", B[:4]), ("c", C)):
        one.serve(name, prompt)
    request, other = Request("d", [*A, 9]), Request("e", C)
    one.manager.match_prefix(request)
    version.write_text("version: RL-STEP02-x", "utf-8")
    one.manager.match_prefix(other)
    one.manager.request_finish(other)
    request.block_tables = one.manager.allocate_gpu_blocks(request, 3)
    check(one.manager)
    assert request.cache_swap_metadata[0].dst_block_ids == [0, 1]
    one.manager.request_finish(request)
    one.manager.check_and_add_pending_backup()
    check(one.manager)
    assert one.manager.num_free_device_blocks == 3
    assert one.manager.num_free_host_blocks == 4


def test_a_reset_ends_the_hold_of_a_match_on_host_blocks(engine):
    one = engine(3, 4)
    for name, prompt in (("a", A), ("b", B[:4]), ("c", C)):
        one.serve(name, prompt)
    request = Request("d", [*A, 9])
    one.manager.match_prefix(request)
    assert request.match_result.matched_host_nums == 2
    assert one.manager.reset_cache()
    one.manager.request_finish(request)
    for name, prompt in (("a", A), ("b", B[:4]), ("c", C)):
        one.serve(name, prompt)
    assert one.serve("d", [*A, 9]) == (0, 2)


def test_a_thread_that_finishes_requests_works_beside_the_scheduler(engine):
    one, rng = engine(6, 6, ranks=2), random.Random(7)
    with ThreadPoolExecutor(1) as pool:
        one.scheduler.finisher = lambda request: pool.submit(one.scheduler.finish_now, request)
        for number in range(80):
            prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 17))]
            one.scheduler.add(Request(f"r{number}", prompt), rng.randrange(1, 4))
            one.scheduler.step()
        one.scheduler.run()
    check(one.manager)
    assert len(one.scheduler.finished) == 80
    assert one.scheduler.wrong == []
    assert one.scheduler.batch_log["load"] > 0
    assert one.manager.statistics().requests == 0


def test_what_a_request_carries_crosses_processes(engine):
    one = engine(3, 2, write_policy="write_back")
    one.serve("a", A)
    one.manager.match_prefix(request := Request("b", B))
    one.manager.allocate_gpu_blocks(request, 2)
    carried = (request._match_result, request.cache_evict_metadata)
    assert carried[1], "a block of a is evicted"
    assert pickle.loads(pickle.dumps(carried)) == carried
    one.manager.request_finish(request)
    one.manager.check_and_add_pending_backup()


# -- indexes: flush-only


def settled(done):
    until = time.monotonic() + LIMIT
    while not done():
        assert time.monotonic() < until, "the index is not informed"
        time.sleep(0.002)


def paths(*prompts):
    return {tuple(prompt[: 4 * (i + 1)]) for prompt in prompts for i in range(len(prompt) // 4)}


@pytest.mark.parametrize("cpu", [0, 2])
def test_an_index_is_told_of_finished_requests_and_of_blocks_that_left_device_and_host(
    engine, service, cpu
):
    one = engine(
        3,
        cpu,
        backend="attention_store",
        environ={"FD_AS_ONLY_FLUSH": "1"},
        options={"attention_store": {"sdk": "tests.support.attentionstore_sdk"}, "layout": LAYOUT},
    )
    index = stand_in.service()
    one.serve("a", A)
    settled(lambda: index.resident == paths(A))
    one.serve("b", B[:3])
    one.serve("c", C)
    if cpu:  # the host has a
        settled(lambda: index.resident == paths(A, C))
        one.serve("d", B[:3])
        one.serve("e", B)
    settled(lambda: not paths(A) <= index.resident)


# -- interface


def test_statistics_have_fastdeploys_keys(engine):
    manager = engine(4, 2).manager
    sizes = {"total_blocks", "used_blocks", "free_blocks", "usage_percent"}
    usage = manager.get_memory_usage()
    assert {level: set(one) for level, one in usage.items()} == {"device": sizes, "host": sizes}
    stats = manager.get_stats()
    assert stats["device_pool"] == {"num_blocks": 4, "used": 0, "available": 4}
    assert stats["host_pool"] == {"num_blocks": 2, "used": 0, "available": 2}
    assert stats["initialized"]
    assert not stats["storage_enabled"]
    assert (stats["num_free_device_blocks"], stats["num_free_host_blocks"]) == (4, 2)


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("kvcache_storage_backend", "file", "num_cpu_blocks is needed"),
        ("kvcache_storage_backend", "attention_store", "with ENABLE_V1_KVCACHE_MANAGER=1"),
        ("write_policy", "write_around", "write_policy"),
        ("write_through_threshold", 0, "write_through_threshold must be at least 1"),
        ("swap_space", 2.0, "swap_space without num_cpu_blocks"),
    ],
)
def test_a_field_that_v1_cannot_honour_is_named(tmp_path, field, value, text):
    config = make_config()
    setattr(config.cache_config, field, value)
    environ = {"FILE_BACKEND_STORAGE_DIR": str(tmp_path)}
    with pytest.raises(ConfigError, match=text):
        CacheManager(config, environ=environ)


def test_roles_of_split_deployments_are_refused():
    config = make_config()
    config.scheduler_config = type("Part", (), {"splitwise_role": "decode"})
    with pytest.raises(ConfigError, match="splitwise_role 'decode'"):
        CacheManager(config, environ={})


def test_each_manager_refuses_the_other_ones_variable():
    with pytest.raises(ConfigError, match="ENABLE_V1_KVCACHE_MANAGER must be 1, not '0'"):
        CacheManager(make_config(), environ={"ENABLE_V1_KVCACHE_MANAGER": "0"})
    with pytest.raises(ConfigError, match="ENABLE_V1_KVCACHE_MANAGER must be 0, not '1'"):
        PrefixCacheManager(make_config(), 1, environ={"ENABLE_V1_KVCACHE_MANAGER": "1"})


@pytest.mark.parametrize("option", ["staging_slots", "fetch_wait_s", "copy_threads", "layout"])
def test_an_option_without_use_is_refused(option):
    value = LAYOUT if option == "layout" else 3
    with pytest.raises(ConfigError, match=option):
        CacheManager(make_config(8, 2), options={option: value}, environ={})


@pytest.mark.parametrize("kind", [CacheManager, CacheController])
def test_arguments_are_fastdeploys(kind):
    wanted = {
        CacheManager: {
            "match_prefix": ["request", "skip_storage"],
            "allocate_device_blocks": ["request", "num_blocks"],
            "allocate_gpu_blocks": ["request", "num_blocks"],
            "can_allocate_device_blocks": ["num"],
            "request_finish": ["request"],
            "issue_pending_backup_to_batch_request": [],
            "check_and_add_pending_backup": [],
            "reset_cache": [],
        },
        CacheController: {
            "initialize_kv_cache": ["attn_backend", "num_gpu_blocks"],
            "initialize_mtp_kv_cache": [
                "attn_backend",
                "num_gpu_blocks",
                "num_mtp_layers",
                "layer_offset",
            ],
            "initialize_host_cache": ["attn_backend"],
            "submit_swap_tasks": ["evict_metadata", "swap_in_metadata"],
            "free_cache": ["clear_storage"],
            "reset_cache": [],
        },
    }[kind]
    for name, arguments in wanted.items():
        found = list(inspect.signature(getattr(kind, name)).parameters)
        assert found[1:] == arguments, name
