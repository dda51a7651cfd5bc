"""Calls of AttentionStore and copies that do not return: their device blocks belong to no other
request before they have ended, also if the engine resets the manager in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest

from kvactors.errors import ConfigError, DeviceError
from kvactors.integrations.fastdeploy import device_cache
from kvactors.integrations.fastdeploy.engine_signals import CLEARED, CLEARING
from kvactors.integrations.fastdeploy.lower_tiers import RankCopies
from kvactors.storage.attention_store import AttentionStoreBackend
from tests.integrations.fastdeploy.config import Request
from tests.integrations.fastdeploy.invariants import check
from tests.integrations.fastdeploy.test_indexes import SDK, as_storage
from tests.integrations.fastdeploy.test_launch import EngineProcess
from tests.integrations.fastdeploy.test_threads import LIMIT
from tests.support import attentionstore_sdk as stand_in

A, B = list(range(8)), list(range(100, 108))


@pytest.fixture
def held(service, monkeypatch):
    """Calls of the SDK take an item from this queue once `hold` is set to it."""
    monkeypatch.setattr("kvactors.tier_cache.storage_loop.CLOSING", 0.05)
    queue: SimpleQueue[None] = SimpleQueue()
    yield queue
    stand_in.service().hold = None
    for _ in range(100):
        queue.put(None)


@contextmanager
def impatient() -> Iterator[None]:
    """Calls are late here after 0.1 s. They have LIMIT themselves, on a busy machine too."""
    with mock.patch.object(device_cache, "MARGIN", 0.1 - LIMIT):
        yield


def release(held: SimpleQueue[None]) -> None:
    stand_in.service().hold = None
    for _ in range(10):
        held.put(None)


def until_free(one: Any, blocks: int) -> None:
    until = time.monotonic() + LIMIT
    while not one.manager.can_allocate_gpu_blocks(blocks):
        assert time.monotonic() < until, "the blocks do not come back"
        time.sleep(0.002)


@pytest.mark.parametrize("resets", [0, 1, 2])
def test_a_read_that_returns_late_writes_no_block_of_another_request(engine, held, resets):
    one = as_storage(engine, LIMIT, gpu=4)
    one.serve("a", A)
    one.manager.reset()
    stand_in.service().hold = held
    held.put(None)  # the look-up
    with impatient():
        assert one.match(Request("b", A))[1] == 0
    for _ in range(resets):
        one.manager.reset()
    assert one.free_blocks == [2, 3], "the others may still be written"
    check(one.manager)
    with pytest.raises(ValueError, match="still"):
        one.manager.recycle_gpu_blocks([0], "b")
    other = Request("c", B)
    stand_in.service().broken = "for a while"
    one.prefill(other)
    stand_in.service().broken = ""
    release(held)
    until_free(one, 2)
    assert not one.wrong(other, 8)
    one.free(other)
    until_free(one, 4)
    check(one.manager)


def test_a_write_that_returns_late_stores_no_bytes_of_another_request(engine, held):
    one = as_storage(engine, LIMIT, gpu=2)
    request = Request("a", A)
    one.prefill(request)
    stand_in.service().hold = held
    held.put(None)  # the look-up
    with impatient():
        one.manager.write_cache_to_storage(request)
    one.free(request)
    assert not one.manager.can_allocate_gpu_blocks(1), "the blocks may still be read"
    release(held)
    until_free(one, 2)
    check(one.manager)
    one.serve("b", B)
    one.manager.reset()
    again = Request("c", A)
    assert one.match(again)[1] == 8
    assert not one.wrong(again, 8)


def test_while_a_call_does_not_return_the_others_wait_for_nothing(engine, held):
    """They would take device blocks, and wait with the scheduler's lock held."""
    one = as_storage(engine, LIMIT, gpu=6)
    one.serve("a", A)
    one.manager.reset()
    stand_in.service().hold = held
    with impatient():
        one.match(Request("b", A))
    assert one.manager.troubles == ("a call of AttentionStore does not return",)
    for number in range(20):
        assert one.match(Request(f"r{number}", A))[1] == 0
    one.serve("c", B)
    assert len(one.free_blocks) == 2
    assert one.available == 4
    release(held)
    until_free(one, 4)
    until = time.monotonic() + LIMIT
    while one.manager.troubles:
        assert time.monotonic() < until
    assert one.manager.can_allocate_gpu_blocks(6)
    again = Request("d", A)
    assert one.match(again)[1] == 8
    assert not one.wrong(again, 8)


def test_a_match_ends_when_the_engine_wants_a_reset(engine, held):
    """The scheduler's thread waits in it, and serves the status."""
    process = EngineProcess(1)
    process.signals["cache_ready_signal"].value[:] = 1
    options = {"attention_store": {"sdk": SDK}, "storage": {"timeout_s": 4 * LIMIT}}
    one = engine(backend="attention_store", options=options, gpu=4, attach=False)
    try:
        process.launch(one)
        one.serve("a", A)
        one.manager.reset()
        service = stand_in.service()
        service.hold, before = held, len(service.calls)
        held.put(None)  # the look-up
        with ThreadPoolExecutor(1) as pool:
            match = pool.submit(one.match, Request("b", A))
            until = time.monotonic() + LIMIT
            while len(service.calls) < before + 2:
                assert time.monotonic() < until, "the read has not begun"
                time.sleep(0.001)
            status = process.signals["prefix_tree_status"].value
            status[0] = CLEARING
            assert match.result(LIMIT)[1] == 0
        assert one.match(Request("c", A))[1] == 0, "none is begun now"
        one.manager.serve_status()
        assert status[0] == CLEARED
        assert one.free_blocks == [2, 3]
        release(held)
        until_free(one, 4)
    finally:
        release(held)
        process.close()


@pytest.mark.parametrize("error", [ValueError("odd"), OSError(5, "no"), KeyError("a")])
def test_a_call_that_raises_has_moved_nothing(engine, service, monkeypatch, error):
    one = as_storage(engine, LIMIT, gpu=4)
    one.serve("a", A)
    one.manager.reset()

    async def fail(*_: Any) -> int:
        raise error

    for name in ("fetch", "save"):
        monkeypatch.setattr(AttentionStoreBackend, name, fail)
    assert one.match(Request("b", A))[:2] == ([], 0)
    assert one.free_blocks == [0, 1, 2, 3]
    one.serve("c", B)
    assert one.available == 4
    monkeypatch.undo()
    one.manager.reset()
    assert one.serve("d", A)["storage_match_token_num"] == 8


def hang(*_: Any) -> str:
    raise DeviceError("a copy has not ended")


@pytest.mark.parametrize("name", ["store", "load"])
def test_blocks_of_a_copy_that_does_not_end_stay_lost_after_a_reset(engine, monkeypatch, name):
    one = engine(gpu=4, cpu=2)
    one.serve("a", A)
    if name == "load":
        one.manager.free_block_ids(1)
    with monkeypatch.context() as patch:
        patch.setattr(RankCopies, name, hang)
        move = one.match if name == "load" else one.manager.free_block_ids
        with pytest.raises(DeviceError):
            move(Request("b", A) if name == "load" else 1)
    for _ in range(2):
        one.manager.reset()
        assert one.free_blocks == [0, 2, 3], "block 1 may still be copied"
        check(one.manager)
    one.config.cache_config.total_block_num = 8
    with pytest.raises((ConfigError, ValueError)):
        one.manager.update_cache_config(one.config.cache_config)
    one.serve("c", B)
    check(one.manager)
