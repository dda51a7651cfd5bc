"""Indexes: AttentionStore in index-only mode, as storage, and sinks for routers."""

from __future__ import annotations

import json
import time
from queue import SimpleQueue

import pytest

from tests.integrations.fastdeploy.config import Request
from tests.integrations.fastdeploy.invariants import check
from tests.support import attentionstore_sdk as stand_in

SDK = "tests.support.attentionstore_sdk"
LIMIT = 30.0
A, B, C = list(range(8)), list(range(100, 108)), list(range(12))


def settled(check):
    until = time.monotonic() + LIMIT
    while not check():
        assert time.monotonic() < until, "the index is not informed"
        time.sleep(0.002)


def paths(*prompts):
    return {tuple(prompt[: 4 * (i + 1)]) for prompt in prompts for i in range(len(prompt) // 4)}


def only_flush(engine, **settings):
    return engine(
        backend="attention_store",
        environ={"FD_AS_ONLY_FLUSH": "1"},
        options={"attention_store": {"sdk": SDK}},
        **settings,
    )


@pytest.mark.parametrize("cpu", [0, 2])
def test_a_finished_request_is_resident_and_an_evicted_end_gone(engine, service, cpu):
    one = only_flush(engine, gpu=4, cpu=cpu)
    index = stand_in.service()
    one.serve("a", A)
    settled(lambda: index.resident == paths(A))
    one.manager.free_block_ids(1)
    one.serve("b", [1, 2, 3])
    if cpu:
        one.serve("c", B[:4])
        settled(lambda: index.resident == paths(A, B[:4]))  # the host has the end of a
        one.manager.free_block_ids(3)
    settled(lambda: index.resident <= paths(A, B[:4]))
    if not cpu:
        settled(lambda: index.resident == paths(A[:4]))
    calls = [call for call in index.calls if call.name == "flush_token_index"]
    assert calls, "no block was reported"
    assert not [call for call in index.calls if call.name in ("read", "write")]


def test_an_eviction_is_one_call_from_its_first_block_with_the_whole_path(engine, service):
    one = only_flush(engine, gpu=4)
    index = stand_in.service()
    one.serve("a", [*A, 8, 9, 10, 11])
    settled(lambda: len(index.resident) == 3)
    before = index.flushes
    one.manager.free_block_ids(2)
    settled(lambda: len(index.resident) == 1)
    assert index.flushes == before + 1
    _, tokens, start = index.calls[-1].arguments[:3]
    assert (len(tokens.ids), start) == (12, 1), "depth 2 is block index 1"


def test_an_eviction_does_not_wait_for_an_index(engine, service):
    one = only_flush(engine, gpu=4)
    index = stand_in.service()
    one.serve("a", [*A, 8, 9, 10, 11])
    settled(lambda: len(index.resident) == 3)
    index.hold = SimpleQueue()
    one.manager.free_block_ids(3)
    assert one.free_blocks == [0, 1, 2, 3]
    assert len(index.resident) == 3, "the call has returned, and the index was not informed yet"
    held, index.hold = index.hold, None
    for _ in range(8):
        held.put(None)
    settled(lambda: not index.resident)


def test_a_request_that_is_preempted_reports_nothing(engine, service):
    one = only_flush(engine, gpu=4)
    index = stand_in.service()
    request = Request("a", A)
    one.prefill(request)
    one.free(request)
    one.serve("b", B)
    settled(lambda: index.resident == paths(B))
    one.serve("c", A)
    settled(lambda: index.resident == paths(A, B))


def test_requests_with_media_are_not_in_an_index_of_tokens(engine, service):
    one = only_flush(engine, gpu=6)
    index = stand_in.service()
    one.serve("a", A, [(5, 2, "cat")])
    one.serve("b", B)
    settled(lambda: index.resident == paths(A[:4], B))


def test_a_reset_takes_everything_back(engine, service):
    one = only_flush(engine, gpu=4, cpu=2)
    index = stand_in.service()
    one.serve("a", A)
    settled(lambda: index.resident == paths(A))
    one.manager.reset()
    settled(lambda: not index.resident)
    one.serve("b", B)
    settled(lambda: index.resident == paths(B))


def test_new_weights_have_an_index_of_their_version(engine, service, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    version = model / "version.yaml"
    version.write_text("version: RL-STEP01-1-a\n", "utf-8")
    one = only_flush(engine, gpu=4, model=str(model))
    one.serve("a", A)
    first = stand_in.service()
    settled(lambda: first.resident == paths(A))
    version.write_text("version: RL-STEP02-2-b\n", "utf-8")
    one.manager.reset()
    one.serve("b", B)
    others = [one for one in stand_in.services.values() if one is not first]
    settled(lambda: [one.resident for one in others] == [paths(B)] and not first.resident)


def test_an_index_that_fails_is_named_and_stops_no_request(engine, service):
    one = only_flush(engine, gpu=4)
    index = stand_in.service()
    index.broken = "out of order"
    for number in range(4):
        one.serve(f"r{number}", [number] * 9)
    settled(lambda: any("out of order" in text for text in one.manager.troubles))
    index.broken = ""
    settled(lambda: not one.manager.troubles)


def test_sinks_of_routers_are_sent_device_and_host(engine, tmp_path):
    path = tmp_path / "events.jsonl"
    sink = {"kind": "jsonl", "path": str(path), "name": "router", "granularity": "per_tier"}
    one = engine(gpu=4, cpu=2, options={"sinks": [sink]})
    one.serve("a", A)
    settled(lambda: path.read_text("utf-8").count("flush") == 1)
    one.manager.free_block_ids(2)
    one.manager.close()
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    seen = [(line["residency"], line["tier"]) for line in lines if line["type"] == "flush"]
    assert ("resident", "device") in seen
    assert ("resident", "host") in seen
    assert ("gone", "device") in seen


# -- AttentionStore as storage


def as_storage(engine, timeout_s=5.0, **settings):
    options = {"attention_store": {"sdk": SDK}, "storage": {"timeout_s": timeout_s}}
    return engine(backend="attention_store", options=options, **settings)


def test_attention_store_keeps_blocks_for_the_next_process(engine, service):
    one = as_storage(engine, gpu=4)
    one.serve("a", A)
    one.manager.close()
    stand_in.restart_process()
    other = as_storage(engine, gpu=4)
    request = Request("b", [*A, 9])
    metrics = other.prefill(request)
    assert metrics["storage_match_token_num"] == 8
    assert not other.wrong(request, 9)


def test_a_write_names_the_whole_path_from_its_start(engine, service):
    one = as_storage(engine, gpu=8)
    index = stand_in.service()
    one.serve("a", [*A, 77])
    one.serve("b", [*C, 78])
    writes = [call.arguments for call in index.calls if call.name == "write"]
    found = [(tokens.ids, start, list(blocks)) for _, tokens, start, _, _, blocks, _ in writes]
    assert found == [(A, 0, [0, 1]), (C, 2, [2])], "the second one adds the block it lacks"


def test_media_are_not_read_from_a_store_of_tokens(engine, service):
    one = as_storage(engine, gpu=6)
    one.serve("a", A)
    one.manager.reset()
    assert one.serve("b", A, [(1, 2, "cat")])["storage_match_token_num"] == 0


def test_each_rank_has_a_shard_of_attention_store(engine, service):
    sinks = [{"kind": "attention_store"}]
    options = {"attention_store": {"sdk": SDK}, "storage": {"timeout_s": LIMIT}, "sinks": sinks}
    one = engine(backend="attention_store", options=options, gpu=4, ranks=2)
    one.serve("a", A)
    one.manager.reset()
    one.memory.lose()
    again = Request("b", A)
    assert one.match(again)[2]["storage_match_token_num"] == 8
    assert not one.wrong(again, 8), "the bytes of both ranks"
    shards = [found for _, found in sorted(stand_in.services.items())]
    assert [shard.calls[0].arguments[0][3:5] for shard in shards] == [(0, 2), (1, 2)]
    one.free(again)
    one.manager.reset()
    shards[1].capacity = 1  # its last block leaves
    one.serve("c", [9] * 4)
    one.manager.reset()
    assert one.match(Request("d", A))[1] < 8, "a block counts if every rank has it"
    check(one.manager)
