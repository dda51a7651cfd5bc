"""Calls with nonsense, in the wrong order, repeated, before the start and after the end: a named
error, and nothing has changed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.errors import CacheClosed, DeviceError, LayoutError, NoRoom
from kvactors.integrations.fastdeploy import PrefixCacheManager
from kvactors.integrations.fastdeploy.lower_tiers import RankCopies
from tests.integrations.fastdeploy.config import BLOCK_SIZE, Position, Request, make_config
from tests.integrations.fastdeploy.invariants import check
from tests.integrations.fastdeploy.oracle import ModelMemory

A = list(range(8))
NAN, INFINITE = float("nan"), float("inf")
ARRAY = np.array([1, 2])


def state(manager: Any) -> Any:
    """Everything that a refused call must not change."""
    check(manager)
    cache = manager._cache
    requests = {name: record.blocks for name, record in cache.requests.items()}
    return sorted(cache.blocks.free), dict(cache.blocks.held), cache.tree.statistics(), requests


@pytest.fixture
def busy(engine):
    """An engine with a request `u` that has computed one of its two blocks."""
    one = engine(gpu=6, cpu=2)
    request = Request("u", [9, *A])
    one.match(request)
    request.block_tables = one.manager.allocate_gpu_blocks(3, "u")
    one.manager.update_cache_blocks(request, BLOCK_SIZE, 4)
    one.request = request
    return one


def refused(one: Any, call: Callable[[], object], error: Any, text: str) -> None:
    before = state(one.manager)
    with pytest.raises(error, match=text):
        call()
    assert state(one.manager) == before


WHOLE: dict[str, Callable[[Any, Any, Any], object]] = {
    "num_blocks": lambda m, _, value: m.allocate_gpu_blocks(value, "u"),
    "gpu_block_ids": lambda m, _, value: m.recycle_gpu_blocks([value], "u"),
    "num_computed_tokens": lambda m, u, value: m.update_cache_blocks(u, BLOCK_SIZE, value),
    "block_size": lambda m, u, value: m.request_match_blocks(u, value),
    "block_size of output": lambda m, u, value: m.cache_output_blocks(u, value),
    "input_token_num": lambda m, _, value: m.get_required_block_num(value, BLOCK_SIZE),
    "block_size of blocks": lambda m, _, value: m.get_required_block_num(8, value),
}
"""Calls with a whole number, by the name in the error."""
FRACTIONS: dict[str, Callable[[Any, Any, Any], object]] = {
    "num_blocks": lambda m, _, value: m.can_allocate_gpu_blocks(value),
    "need_block_num": lambda m, _, value: m.free_block_ids(value),
}
REQUESTS: list[Callable[[Any, Any], object]] = [
    lambda m, request: m.request_match_blocks(request, BLOCK_SIZE),
    lambda m, request: m.update_cache_blocks(request, BLOCK_SIZE, 8),
    lambda m, request: m.cache_output_blocks(request, BLOCK_SIZE),
    lambda m, request: m.write_cache_to_storage(request),
    lambda m, request: m.release_block_ids(request),
]


def test_arguments_of_another_type_or_out_of_range_are_refused(busy):
    for name, call in WHOLE.items():
        for value in (None, "1", 1.0, NAN, [1], ARRAY):
            text = f"{name.split()[0]} must be an integer"
            refused(busy, partial(call, busy.manager, busy.request, value), TypeError, text)
    for name, value, least in (("block_size of blocks", 0, 1), ("input_token_num", -1, 0)):
        text = f"{name.split()[0]} must be at least {least}, not {value}"
        refused(busy, partial(WHOLE[name], busy.manager, None, value), ValueError, text)
    for name, call in FRACTIONS.items():
        for value in (None, "3", [1], ARRAY, NAN, INFINITE, -INFINITE):
            error = ValueError if isinstance(value, float) else TypeError
            refused(busy, partial(call, busy.manager, None, value), error, f"{name} must be")
    for call in REQUESTS:
        for value in (None, 5, 1.5, "u", [], object(), np.array([[1]])):
            refused(busy, partial(call, busy.manager, value), TypeError, "a request must have")
        for value in (None, 7, NAN, ["a"]):
            request, text = Request(value, A), "request_id must be a string"
            refused(busy, partial(call, busy.manager, request), TypeError, text)


@pytest.mark.parametrize("field", ["prompt_token_ids", "output_token_ids", "block_tables"])
def test_a_request_without_a_field_is_refused(busy, field):
    delattr(busy.request, field)
    text = f"a request must have {field}, and Request has not"
    refused(busy, partial(REQUESTS[1], busy.manager, busy.request), TypeError, text)


TOKENS = [
    ("prompt_token_ids", None, TypeError, "prompt_token_ids of request 'u' must be a list"),
    ("prompt_token_ids", "text", TypeError, "prompt_token_ids of request 'u' must be a list"),
    ("prompt_token_ids", [-1], ValueError, "token ids must be between 0 and"),
    ("prompt_token_ids", [2**32], ValueError, "token ids must be between 0 and"),
    ("prompt_token_ids", [1.5], TypeError, "integer"),
    ("prompt_token_ids", [True], TypeError, "not bool"),
    ("output_token_ids", {}, TypeError, "output_token_ids of request 'u' must be a list"),
    ("output_token_ids", 5, TypeError, "output_token_ids of request 'u' must be a list"),
    ("multimodal_inputs", [1], TypeError, "multimodal_inputs must be a mapping, not list"),
]


@pytest.mark.parametrize(("field", "value", "error", "text"), TOKENS)
def test_tokens_that_are_none_are_refused_and_the_earlier_match_stays(
    busy, field, value, error, text
):
    kept = getattr(busy.request, field)
    setattr(busy.request, field, value)
    refused(busy, lambda: busy.manager.request_match_blocks(busy.request, BLOCK_SIZE), error, text)
    setattr(busy.request, field, kept)
    busy.manager.update_cache_blocks(busy.request, BLOCK_SIZE, 8)
    assert busy.request.num_cached_blocks == 2


@pytest.mark.parametrize(
    ("positions", "hashes", "error", "text"),
    [
        ([Position(0, 1 << 40)], ["a"], ValueError, "beyond the prompt's 9 tokens"),
        ([Position(0, -1)], ["a"], ValueError, "items must be ascending"),
        ([Position(4, 2), Position(0, 2)], ["a", "b"], ValueError, "items must be ascending"),
        ([Position(0, 2)], [], ValueError, "1 media positions, 0 hashes"),
        ([Position(0.5, 2)], ["a"], TypeError, "a media offset must be an integer"),
        ([Position(0, "2")], ["a"], TypeError, "a media length must be an integer"),
        ([Position(0, 2)], [None], TypeError, "a media hash must be bytes, str or int"),
        ([(0, 2)], ["a"], TypeError, r"mm_positions must have offset and length, not \(0, 2\)"),
        (5, ["a"], TypeError, "mm_positions must be a list, not int"),
        ([Position(0, 2)], "a", TypeError, "mm_hashes must be a list, not str"),
        (np.array([[0, 2], [4, 2]]), ["a", "b"], TypeError, "mm_positions must have offset"),
    ],
)
def test_media_that_do_not_fit_are_refused_at_once(busy, positions, hashes, error, text):
    busy.request.multimodal_inputs = {"mm_positions": positions, "mm_hashes": hashes}
    refused(busy, lambda: busy.manager.request_match_blocks(busy.request, BLOCK_SIZE), error, text)


@pytest.mark.parametrize("table", [None, 5, {0: 0}, [0, "1"], [0, 1.0], [0, None]])
def test_a_block_table_of_nonsense_is_refused(busy, table):
    busy.request.block_tables = table
    text = r"block_tables of request 'u'|a block id must be"
    refused(busy, partial(REQUESTS[1], busy.manager, busy.request), TypeError, text)


@pytest.mark.parametrize("wrong", ["table", "tokens"])
def test_tokens_of_a_refused_commit_are_not_kept(busy, wrong):
    """The engine corrects the call and makes it again: the block is found by its tokens only."""
    manager, request = busy.manager, busy.request
    table, request.prompt_token_ids = request.block_tables, [9, *A, 1, 2]
    request.output_token_ids = [3] if wrong == "table" else [-1]
    if wrong == "table":
        request.block_tables = table[:1]
    with pytest.raises(ValueError, match=r"block table of request 'u'|token"):
        manager.update_cache_blocks(request, BLOCK_SIZE, 12)
    request.block_tables, request.prompt_token_ids = table, [9, *A, 5, 6]
    request.output_token_ids = [7]
    manager.update_cache_blocks(request, BLOCK_SIZE, 12)
    busy.free(request)
    assert busy.match(Request("v", [9, *A, 1, 2, 3, 0]))[1] == 8
    assert busy.match(Request("w", [9, *A, 5, 6, 7, 0]))[1] == 12


def test_a_request_that_lost_tokens_is_refused(busy):
    busy.request.prompt_token_ids = A[:2]
    with pytest.raises(ValueError, match="had 9 tokens and has 2 now"):
        busy.manager.update_cache_blocks(busy.request, BLOCK_SIZE, 2)


def test_buffers_of_a_request_may_be_used_again(engine):
    """The chain of a request is that of the tokens at its match."""
    one = engine(gpu=4)
    prompt = np.array(A)
    request = Request("a", prompt)
    one.match(request)
    request.block_tables = one.manager.allocate_gpu_blocks(2, "a")
    prompt[:] = 77
    one.manager.update_cache_blocks(request, BLOCK_SIZE, 8)
    one.free(request)
    assert one.match(Request("b", [77] * 8))[1] == 0
    assert one.match(Request("c", A))[1] == 8


def test_repeated_calls_change_nothing(busy):
    manager, request = busy.manager, busy.request
    manager.update_cache_blocks(request, BLOCK_SIZE, 4)
    before = state(manager)
    for computed in (4, 0, -8):
        manager.update_cache_blocks(request, BLOCK_SIZE, computed)
        assert request.num_cached_blocks == 1
    assert state(manager) == before
    for _ in range(3):
        manager.release_block_ids(request)
    manager.recycle_gpu_blocks(request.block_tables[1:], "u")
    assert busy.available == 6
    with pytest.raises(ValueError, match="free already"):
        manager.recycle_gpu_blocks(request.block_tables[1:], "u")
    assert busy.available == 6


# -- before the start and after the end


def test_calls_after_the_end(engine):
    one = engine(gpu=4, cpu=2, file=True)
    one.serve("a", A)
    request = Request("b", A)
    one.match(request)
    for _ in range(2):
        one.manager.close()
    one.manager.write_cache_to_storage(request)
    one.free(request)
    assert one.manager.can_allocate_gpu_blocks(4)
    one.serve("c", A)
    one.manager.free_block_ids(4)
    one.manager.reset()
    assert one.available == 4
    check(one.manager)
    with pytest.raises(CacheClosed):
        one.manager.attach()


def test_an_end_during_a_match(engine, monkeypatch):
    """The engine's process ends while its scheduler waits for a copy."""
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    one.manager.free_block_ids(2)
    load = RankCopies.load

    def closed(copies, blocks, slots):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(one.manager.close).result(30)
        return load(copies, blocks, slots)

    monkeypatch.setattr(RankCopies, "load", closed)
    request = Request("b", A)
    try:
        one.match(request)
    except CacheClosed:
        request.block_tables = []
    else:
        assert not one.wrong(request, len(request.block_tables) * BLOCK_SIZE)
    one.manager.release_block_ids(request)


# -- numbers of numpy, and caching that is off


def test_numbers_of_fastdeploys_shared_arrays_are_integers():
    """FastDeploy sets `total_block_num` from an array in shared memory."""
    config = make_config(0)
    manager = PrefixCacheManager(config, np.int64(1), environ={})
    config.cache_config.total_block_num = np.array([4], np.int32)[0]
    manager.update_cache_config(config.cache_config)
    assert manager.allocate_gpu_blocks(np.int32(4), "a") == [0, 1, 2, 3]


def test_without_prefix_caching_requests_hold_nothing(engine):
    one = engine(gpu=4, enable_prefix_caching=False)
    for number in range(3):
        request = Request(f"r{number}", A)
        assert one.prefill(request)["gpu_match_token_num"] == 0
        assert request.num_cached_blocks == 0
        one.manager.cache_output_blocks(request, BLOCK_SIZE)
        one.free(request)
        assert one.free_blocks == [0, 1, 2, 3]


# -- functions of the engine that fail


@pytest.mark.parametrize("stream", [lambda: 1 // 0, lambda: "x", lambda: 7, 5])
def test_a_stream_that_cannot_be_used_costs_hits_and_no_block(stream):
    memory = ModelMemory(4, BLOCK_SIZE)
    manager = PrefixCacheManager(
        make_config(4, 2), 1, tensors=memory.tensors, stream=stream, environ={}
    )
    manager.attach()
    request = Request("a", A)
    manager.request_match_blocks(request, BLOCK_SIZE)
    request.block_tables = manager.allocate_gpu_blocks(2, "a")
    manager.update_cache_blocks(request, BLOCK_SIZE, 8)
    manager.release_block_ids(request)
    manager.free_block_ids(2)
    check(manager)
    assert len(manager.gpu_free_block_list) == 4
    assert manager.request_match_blocks(Request("b", A), BLOCK_SIZE)[1] == 0
    manager.close()


@pytest.mark.parametrize("tensors", [5, "x", {1: 2}, {"key_caches_0_rank0": None}])
def test_tensors_of_nonsense_leave_a_manager_that_can_be_closed(tensors):
    manager = PrefixCacheManager(make_config(4, 2), 1, tensors=tensors, environ={})
    with pytest.raises((LayoutError, DeviceError), match="tensor"):
        manager.attach()
    assert manager.allocate_gpu_blocks(1, "a") == [0]
    manager.close()


# -- sequences of calls, drawn

NUMBERS = st.one_of(
    st.integers(-3, 66), st.sampled_from([None, "3", 1.5, NAN, INFINITE, np.int32(2), 1 << 70, [1]])
)
REFUSALS = (TypeError, ValueError, LookupError, NoRoom)


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 64),
    calls=st.lists(
        st.tuples(st.integers(0, 8), st.sampled_from("abc"), NUMBERS, NUMBERS), max_size=40
    ),
)
def test_any_sequence_of_calls_leaves_each_block_in_one_place(total, calls):
    """Calls in any order and with any number. A refused one changes nothing."""
    manager = PrefixCacheManager(make_config(total), 1, environ={})
    requests = {name: Request(name, [ord(name) % 2] * 9) for name in "abc"}
    for kind, name, first, second in calls:
        request = requests[name]
        before = state(manager)
        try:
            _call(manager, kind, request, first, second)
        except REFUSALS:
            assert state(manager) == before
        state(manager)


def _call(manager: Any, kind: int, request: Any, first: Any, second: Any) -> None:
    size = second if kind == 8 else BLOCK_SIZE
    calls: list[Any] = [
        lambda: manager.can_allocate_gpu_blocks(first),
        lambda: request.block_tables.extend(manager.allocate_gpu_blocks(first, request.request_id)),
        lambda: manager.recycle_gpu_blocks([first, second], request.request_id),
        lambda: manager.free_block_ids(first),
        lambda: request.__setattr__(
            "block_tables", manager.request_match_blocks(request, BLOCK_SIZE)[0]
        ),
        lambda: manager.update_cache_blocks(request, BLOCK_SIZE, first),
        lambda: manager.cache_output_blocks(request, BLOCK_SIZE),
        lambda: manager.release_block_ids(request),
        lambda: manager.request_match_blocks(SimpleNamespace(**vars(request)), size),
    ]
    calls[kind]()
