"""The behaviours of FastDeploy's manager that a replacement keeps, one test each, and those of its
defects that this one does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvactors.errors import ConfigError, NoRoom
from kvactors.integrations.fastdeploy.lower_tiers import RankCopies
from kvactors.integrations.fastdeploy.metrics import WINDOW
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Request
from tests.integrations.fastdeploy.invariants import check

A, B, C = list(range(8)), list(range(100, 108)), list(range(200, 208))


class Gauges:
    """FastDeploy's `main_process_metrics`."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(set=lambda value: self.values.__setitem__(name, value))


# -- blocks


def test_a_fresh_pool_gives_ids_0_and_1_and_the_gauge_falls(engine):
    gauges = Gauges()
    manager = engine(gpu=4, cpu=2, gauges=gauges).manager
    assert manager.allocate_gpu_blocks(2, "a") == [0, 1]
    assert gauges.values["free_gpu_block_num"] == 2


def test_too_few_free_blocks_evict_and_then_answer(engine):
    one = engine(gpu=4)
    one.serve("a", A)
    assert len(one.free_blocks) == 2
    assert not one.manager.can_allocate_gpu_blocks(3, try_free_gpu_blocks=False)
    assert one.manager.can_allocate_gpu_blocks(3)
    assert len(one.free_blocks) == 3
    assert not one.manager.can_allocate_gpu_blocks(5)
    assert len(one.free_blocks) == 3, "an answer of no has evicted blocks"


def test_more_blocks_than_are_free_are_refused_before_anything_is_taken(engine):
    manager = engine(gpu=3).manager
    assert manager.allocate_gpu_blocks(0, "a") == []
    with pytest.raises(NoRoom, match="4 device blocks needed, 3 available"):
        manager.allocate_gpu_blocks(4, "a")
    assert len(manager.gpu_free_block_list) == 3


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (8, 2), (5, 2), (1, 1)])
def test_required_blocks_are_rounded_up(engine, tokens, blocks):
    assert engine(gpu=1).manager.get_required_block_num(tokens, BLOCK_SIZE) == blocks


def test_the_pool_follows_a_change_of_the_cache_config(engine):
    one = engine(gpu=4)
    for total in (9, 2, 0, 7):
        one.config.cache_config.total_block_num = total
        one.manager.update_cache_config(one.config.cache_config)
        assert one.manager.num_gpu_blocks == total
    assert one.manager.allocate_gpu_blocks(7, "a") == list(range(7))
    one.config.cache_config.total_block_num = 8
    with pytest.raises(ConfigError, match="7 and cannot become 8: 7 blocks are in use"):
        one.manager.update_cache_config(one.config.cache_config)


@pytest.mark.parametrize(
    ("blocks", "owner", "text"),
    [
        ([0], "a", "block 0 of 4 is free already"),
        ([9], "a", "block 9 of 4 is out of range"),
        ([-1], "a", "block -1 of 4 is out of range"),
        ([1, 1], "a", "a block is named twice"),
        ([1], "b", "block 2 is held for request 'a', not 'b'"),
        ([3], "c", "block 3 of 4 is in the prefix cache, not the engine's"),
    ],
)
def test_a_block_that_the_engine_does_not_hold_is_refused(engine, blocks, owner, text):
    one = engine(gpu=4)
    manager = one.manager
    manager.allocate_gpu_blocks(3, "a")
    one.prefill(Request("c", C[:4]))
    manager.recycle_gpu_blocks([0], "a")
    with pytest.raises(ValueError, match=text):
        manager.recycle_gpu_blocks([2, *blocks], "a" if owner == "c" else owner)
    check(manager)
    assert one.free_blocks == [0], "a refused call has changed something"


# -- matches


def test_device_blocks_come_first_then_those_of_the_host(engine):
    one = engine(gpu=4, cpu=4)
    one.serve("a", A)
    one.manager.free_block_ids(1)  # the deeper block moves to the host
    metrics = one.prefill(Request("b", [*A, 1]))
    assert (metrics["gpu_match_token_num"], metrics["cpu_match_token_num"]) == (4, 4)
    assert metrics["match_gpu_block_ids"] == [0]
    assert len(metrics["gpu_recv_block_ids"]) == 1
    assert metrics["cpu_cache_prepare_time"] > 0


def test_host_blocks_that_do_not_fit_on_the_device_are_an_error_that_holds_nothing(engine):
    one = engine(gpu=4, cpu=4)
    one.serve("a", [*A, 1, 2, 3, 4])
    one.manager.free_block_ids(2)
    taken = one.manager.allocate_gpu_blocks(3, "other")
    for _ in range(3):
        with pytest.raises(NoRoom):
            one.match(Request("b", [*A, 1, 2, 3, 4]))
        one.free(Request("b", A))
    assert one.available == 1
    one.manager.recycle_gpu_blocks(taken, "other")
    found = one.prefill(Request("b", [*A, 1, 2, 3, 4]))
    assert (found["gpu_match_token_num"], found["cpu_match_token_num"]) == (4, 8)


def test_rates_start_from_zero_at_request_10000(engine):
    one = engine(gpu=4)
    one.serve("a", A)
    one.manager.metrics.req_count = WINDOW - 2
    one.serve("b", A)
    assert one.manager.metrics.hit_req_count == 1
    one.serve("c", A)
    assert one.manager.metrics.req_count == one.manager.metrics.hit_req_count == 0
    assert one.manager.statistics().hit_token_ratio == 0.0
    assert one.manager.statistics().gpu_tokens == 16, "counters only grow"


def test_a_request_without_tokens_divides_nothing(engine):
    one = engine(gpu=2)
    assert one.match(Request("a", []))[:2] == ([], 0)
    assert one.manager.statistics().hit_token_ratio == 0.0


def test_a_match_of_a_host_block_brings_it_to_the_device_and_keeps_it(engine):
    one = engine(gpu=2, cpu=2)
    one.serve("a", A)
    one.manager.free_block_ids(2)
    request = Request("b", A)
    one.match(request)
    assert not one.wrong(request, 8)
    assert not one.manager.can_allocate_gpu_blocks(1), "a held block was evicted"


def test_media_are_part_of_a_blocks_identity(engine):
    one = engine(gpu=8)
    media = [(2, 4, "cat")]
    one.serve("a", A, media)
    assert one.serve("b", A, [(2, 4, "dog")])["gpu_match_token_num"] == 0
    assert one.serve("c", A, [(3, 4, "cat")])["gpu_match_token_num"] == 0
    assert one.serve("d", A)["gpu_match_token_num"] == 0
    assert one.serve("e", A, media)["gpu_match_token_num"] == 8


@pytest.mark.parametrize("item", [(5, 1), (4, 2), (1, 5)])
def test_an_item_in_the_tail_is_part_of_the_block_that_the_output_fills(engine, item):
    """The tail of 2 tokens has no hash before the output has filled its block."""
    one = engine(gpu=8)
    request = Request("a", list(range(6)), [(*item, "cat")])
    one.prefill(request)
    assert request.num_cached_blocks == 1
    request.output_token_ids += [7, 7, 7]
    request.block_tables += one.manager.allocate_gpu_blocks(1, "a")
    one.manager.cache_output_blocks(request, BLOCK_SIZE)
    assert request.num_cached_blocks == 2
    one.free(request)
    tokens = request.tokens
    assert one.match(Request("b", tokens, [(*item, "dog")]))[1] == (0 if item[0] < 4 else 4)
    assert one.match(Request("c", tokens))[1] == (0 if item[0] < 4 else 4)
    assert one.match(Request("d", tokens, [(*item, "cat")]))[1] == 8


# -- commits


def test_a_chunk_counts_its_full_blocks_and_the_tail_stays_the_engines(engine):
    one = engine(gpu=4)
    for tokens, blocks in ((11, 2), (3, 0)):
        request = Request("a", list(range(100, 100 + tokens)))
        one.prefill(request)
        assert request.num_cached_blocks == blocks
        one.free(request)
        assert one.match(request)[1] == blocks * BLOCK_SIZE
        one.manager.reset()
        check(one.manager)


def test_a_block_of_two_requests_has_one_owner(engine):
    """FastDeploy replaced the first block, which nothing could reach any more."""
    one = engine(gpu=8)
    first, second = Request("a", A), Request("b", A)
    one.match(first)
    one.match(second)
    for request in (first, second):
        request.block_tables = one.manager.allocate_gpu_blocks(2, request.request_id)
        one.manager.update_cache_blocks(request, BLOCK_SIZE, 8)
    assert first.num_cached_blocks == second.num_cached_blocks == 2
    assert one.match(Request("c", A))[0] == first.block_tables
    check(one.manager)
    one.free(second)
    assert one.free_blocks == [2, 3, 4, 5, 6, 7]
    one.free(first)
    assert one.available == 6, "the third request holds 2"


def test_output_replaces_a_host_copy(engine):
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    one.manager.free_block_ids(2)
    request = Request("b", A[:3])
    one.prefill(request)
    request.output_token_ids += [3, 4, 5, 6, 7, 9]
    request.block_tables += one.manager.allocate_gpu_blocks(2, "b")
    one.manager.cache_output_blocks(request, BLOCK_SIZE)
    assert request.num_cached_blocks == 2
    assert request.block_tables[:2] == one.match(Request("c", [*A, 9]))[0]


def test_the_last_output_token_is_not_computed(engine):
    one = engine(gpu=4)
    request = Request("a", A[:6])
    one.prefill(request)
    request.output_token_ids += [6, 7]
    one.manager.cache_output_blocks(request, BLOCK_SIZE)
    assert request.num_cached_blocks == 1, "token 7 was never an input"
    request.output_token_ids += [8]
    request.block_tables += one.manager.allocate_gpu_blocks(1, "a")
    one.manager.cache_output_blocks(request, BLOCK_SIZE)
    assert request.num_cached_blocks == 2


@pytest.mark.parametrize("call", ["update_cache_blocks", "cache_output_blocks"])
def test_a_table_without_the_blocks_is_refused(engine, call):
    one = engine(gpu=4)
    request = Request("a", [*A, 1])
    one.match(request)
    request.block_tables = one.manager.allocate_gpu_blocks(1, "a")
    extra = (8,) if call == "update_cache_blocks" else ()
    with pytest.raises(ValueError, match="has 1 blocks, and 2 are full"):
        getattr(one.manager, call)(request, BLOCK_SIZE, *extra)
    request.block_tables = [0, 3]
    with pytest.raises(ValueError, match="block 3 of 4 is free already"):
        getattr(one.manager, call)(request, BLOCK_SIZE, *extra)
    with pytest.raises(ValueError, match="block_size is 4 in the config, and 8 here"):
        getattr(one.manager, call)(request, 8, *extra)
    assert request.num_cached_blocks == 0
    check(one.manager)


def test_a_request_that_was_not_matched_is_named(engine):
    one = engine(gpu=4)
    request = Request("a", A)
    with pytest.raises(LookupError, match="request 'a' holds nothing"):
        one.manager.update_cache_blocks(request, BLOCK_SIZE, 8)
    one.manager.release_block_ids(request)
    one.manager.write_cache_to_storage(request)


def test_a_second_match_without_a_release_holds_the_blocks_once(engine):
    """The scheduler matches a request again that found no budget in its first step."""
    one = engine(gpu=4)
    one.serve("a", A)
    request = Request("b", [*A, 1])
    for _ in range(5):
        one.match(request)
    one.free(request)
    assert one.available == 4


# -- eviction


def test_a_released_chain_leaves_from_its_end_and_stops_at_a_sibling(engine):
    one = engine(gpu=6)
    one.serve("a", [*A[:4], 1, 1, 1, 1])
    one.serve("b", [*A[:4], 2, 2, 2, 2])
    keeper = Request("c", [*A[:4], 2, 2, 2, 2])
    one.match(keeper)
    one.manager.free_block_ids(6)
    assert len(one.free_blocks) == 4, "the shared block and its other child are held"
    assert one.match(Request("d", [*A[:4], 1, 1, 1, 1]))[1] == 4


def test_the_least_recently_used_leaf_goes_first(engine):
    one = engine(gpu=6)
    for name, prompt in (("a", A), ("b", B), ("c", C)):
        one.serve(name, prompt)
    one.serve("d", A)
    one.manager.free_block_ids(0)
    one.manager.free_block_ids(3)
    assert one.match(Request("e", A))[1] == 8
    assert one.match(Request("f", C))[1] == 4, "its deeper block is older than its first"
    assert one.match(Request("g", B))[1] == 0


def test_blocks_that_a_request_holds_are_not_evicted(engine):
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    request = Request("b", A)
    one.prefill(request)
    one.manager.free_block_ids(4)
    assert not one.manager.can_allocate_gpu_blocks(3)
    assert not one.wrong(request, 8)


def test_a_larger_eviction_than_the_host_has_slots_keeps_the_start_of_the_path(engine):
    one = engine(gpu=4, cpu=1)
    one.serve("a", [*A, 1, 2, 3, 4])
    one.manager.free_block_ids(3)
    assert one.free_blocks == [0, 1, 2, 3]
    metrics = one.prefill(Request("b", [*A, 1, 2, 3, 4]))
    assert metrics["cpu_match_token_num"] == 4


def test_host_blocks_leave_from_the_end_of_their_path(engine):
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    one.manager.free_block_ids(2)
    one.serve("b", B[:4])
    one.manager.free_block_ids(1)  # takes the slot of a's second block
    assert one.match(Request("c", A))[1] == 4


def test_an_eviction_from_the_host_stops_when_there_is_enough(engine):
    one, long = engine(gpu=8, cpu=4), [*A, 8, 9, 10, 11]
    one.serve("a", long)
    one.manager.free_block_ids(3)
    one.serve("b", B)
    one.manager.free_block_ids(2)  # one slot is free, so one block of a leaves
    assert one.match(Request("c", long))[1] == 8
    assert one.match(Request("d", B))[1] == 8


def test_a_failed_copy_to_the_host_loses_the_block_and_nothing_else(engine, monkeypatch):
    one = engine(gpu=4, cpu=4)
    one.serve("a", A)
    monkeypatch.setattr(RankCopies, "store", lambda *_: "injected")
    one.manager.free_block_ids(2)
    monkeypatch.undo()
    assert one.free_blocks == [0, 1, 2, 3]
    assert one.match(Request("b", A))[1] == 0
    check(one.manager)


def test_a_failed_copy_to_the_device_is_a_miss(engine, monkeypatch):
    one = engine(gpu=4, cpu=4)
    one.serve("a", A)
    one.manager.free_block_ids(2)
    monkeypatch.setattr(RankCopies, "load", lambda *_: "injected")
    assert one.match(Request("b", A))[:2] == ([], 0)
    monkeypatch.undo()
    assert one.free_blocks == [0, 1, 2, 3]
    assert one.match(Request("c", A))[1] == 8


# -- storage


def test_finished_blocks_are_found_by_the_next_process(engine):
    one = engine(gpu=4, file=True)
    one.serve("a", A)
    assert one.manager.statistics().written_blocks == 2
    one.manager.close()
    other = engine(gpu=4, file=True)
    request = Request("b", A)
    metrics = other.prefill(request)
    assert metrics["storage_match_token_num"] == 8
    assert metrics["match_storage_block_ids"] == [0, 1]
    assert metrics["storage_cache_prepare_time"] > 0
    assert not other.wrong(request, 8)


def test_blocks_that_storage_does_not_have_are_not_taken(engine):
    one = engine(gpu=8, file=True)
    one.serve("a", A[:4])
    one.manager.reset()
    request = Request("b", A)
    assert one.match(request)[:2] == ([0], 4)
    assert len(one.free_blocks) == 7


def test_stored_blocks_that_do_not_fit_are_misses(engine):
    one = engine(gpu=4, file=True)
    one.serve("a", A)
    one.manager.reset()
    one.manager.allocate_gpu_blocks(3, "other")
    assert one.match(Request("b", A))[1] == 4
    one.manager.allocate_gpu_blocks(0, "other")
    assert one.match(Request("c", B))[1] == 0


def test_more_stored_blocks_than_host_slots_are_loaded_in_turns(engine):
    prompt = list(range(28))
    one = engine(gpu=8, cpu=2, file=True, options={"staging_slots": 3})
    one.serve("a", prompt)
    one.manager.reset()
    request = Request("b", prompt)
    assert one.match(request)[1] == 28
    assert not one.wrong(request, 28)


@pytest.mark.parametrize(("file", "prompt"), [(False, A), (True, A[:3])])
def test_without_a_store_or_a_full_block_nothing_is_written(engine, file, prompt):
    one = engine(gpu=4, file=file)
    one.serve("a", prompt)
    assert one.manager.statistics().written_blocks == 0


# -- reset


def test_a_reset_empties_everything(engine):
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    one.manager.free_block_ids(1)
    one.prefill(Request("b", A))
    one.manager.reset(wait_for_tasks_done=True)
    assert one.free_blocks == [0, 1, 2, 3]
    assert one.manager.statistics().hit_req_ratio == 0
    assert one.match(Request("c", A))[1] == 0
    check(one.manager)


def test_blocks_of_before_a_reset_are_returned_without_effect(engine):
    one = engine(gpu=3)
    one.serve("a", A[:4])
    request = Request("b", [*A[:4], 1, 2])
    one.prefill(request)
    one.manager.reset()
    taken = one.manager.allocate_gpu_blocks(3, "c")
    one.free(request)
    assert one.free_blocks == []
    check(one.manager)
    one.manager.recycle_gpu_blocks(taken, "c")
    with pytest.raises(ValueError, match="free already"):
        one.manager.recycle_gpu_blocks(taken, "c")


# -- metrics


def test_values_follow_requests(engine):
    gauges = Gauges()
    one = engine(gpu=4, cpu=2, gauges=gauges)
    one.serve("a", A)
    one.manager.free_block_ids(1)
    one.match(Request("b", A))
    assert gauges.values == {
        "hit_req_rate": 0.5,
        "hit_token_rate": 0.5,
        "gpu_hit_token_rate": 0.25,
        "cpu_hit_token_rate": 0.25,
        "available_gpu_block_num": 2,
        "free_gpu_block_num": 2,
        "max_gpu_block_num": 4,
        "max_cpu_block_num": 2,
        "available_gpu_resource": 0.5,
    }


def test_values_follow_a_match_that_fails(engine):
    """It has released the blocks of the earlier match."""
    gauges = Gauges()
    one = engine(gpu=4, cpu=2, gauges=gauges)
    one.serve("a", A)
    one.manager.free_block_ids(2)
    one.prefill(Request("b", B[:4]))
    one.manager.allocate_gpu_blocks(3, "c")
    with pytest.raises(NoRoom):
        one.match(Request("b", A))
    assert gauges.values["available_gpu_block_num"] == one.available == 1
