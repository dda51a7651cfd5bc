"""Calls under each status of the engine, evictions that stop in time, and the arguments of writes."""

from __future__ import annotations

import time
from queue import SimpleQueue
from threading import Timer

import pytest

from kvactors.integrations.fastdeploy.engine_signals import CLEARING, NORMAL
from tests.integrations.fastdeploy.config import Request
from tests.integrations.fastdeploy.test_indexes import as_storage, only_flush, settled
from tests.integrations.fastdeploy.test_launch import EngineProcess
from tests.support import attentionstore_sdk as stand_in

A, B = list(range(12)), list(range(100, 108))


@pytest.fixture
def process():
    made = EngineProcess(1)
    made.signals["cache_ready_signal"].value[:] = 1
    yield made
    made.close()


# -- the status


def test_a_wait_for_storage_ends_when_the_status_is_normal_no_more(engine, process, shared):
    options = {"fetch_wait_s": 30.0, "storage": {"timeout_s": 600.0, "close_timeout_s": 0.1}}
    one = engine(gpu=6, cpu=2, file=True, attach=False, options=options)
    process.launch(one)
    engine(gpu=6, file=True).serve("a", A)
    shared.mode = "hang"
    status = process.signals["prefix_tree_status"].value

    def clear() -> None:
        status[0] = CLEARING

    timer = Timer(0.05, clear)
    timer.start()
    begun = time.monotonic()
    assert one.match(Request("b", A))[1] == 0
    assert time.monotonic() - begun < 20, "the wait went on"
    timer.join()
    shared.mode = "ok"
    status[0] = NORMAL
    assert one.match(Request("c", A))[1] == 12


# -- evictions


def test_an_eviction_from_the_host_stops_when_there_is_enough(engine):
    one = engine(gpu=8, cpu=4)
    one.serve("a", A)
    one.manager.free_block_ids(3)
    one.serve("b", B)
    one.manager.free_block_ids(2)  # one slot is free, so one block of a leaves
    assert one.match(Request("c", A))[1] == 8
    assert one.match(Request("d", B))[1] == 8


def test_an_eviction_does_not_wait_for_an_index(engine, service):
    one = only_flush(engine, gpu=4)
    index = stand_in.service()
    one.serve("a", A)
    settled(lambda: len(index.resident) == 3)
    index.hold = SimpleQueue()
    one.manager.free_block_ids(3)
    assert one.free_blocks == [0, 1, 2, 3]
    assert len(index.resident) == 3, "the call has returned, and the index was not informed yet"
    held, index.hold = index.hold, None
    for _ in range(8):
        held.put(None)
    settled(lambda: not index.resident)


# -- writes


def test_a_write_names_the_whole_path_from_its_start(engine, service):
    one = as_storage(engine, gpu=8)
    index = stand_in.service()
    one.serve("a", [*A[:8], 77])
    one.serve("b", [*A, 78])
    writes = [call.arguments for call in index.calls if call.name == "write"]
    found = [(tokens.ids, start, list(blocks)) for _, tokens, start, _, _, blocks, _ in writes]
    assert found == [(A[:8], 0, [0, 1]), (A, 2, [2])], "the second one adds the block it lacks"
