"""Transfers between the tiers and the store: the calls that a request makes, those that nothing
makes, and results that are no bytes."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from kvactors.integrations.fastdeploy.lower_tiers import FinishWrites, RankCopies
from tests.integrations.fastdeploy.config import Request
from tests.tier_cache.stores import SharedStore

A, B = list(range(16)), list(range(100, 116))
QUIET = 0.05
"""Seconds in which an idle engine must make no call."""


class Calls:
    """Calls of the store and of the copies, in order: name and arguments."""

    def __init__(self, monkeypatch: Any) -> None:
        self.made: list[tuple[str, tuple[Any, ...]]] = []
        for name in ("ask", "read", "write", "remove"):
            monkeypatch.setattr(SharedStore, name, self._noted(name, getattr(SharedStore, name)))
        for name, move in (("to_host", RankCopies.store), ("to_device", RankCopies.load)):
            method = "store" if name == "to_host" else "load"
            monkeypatch.setattr(RankCopies, method, self._noted(name, move))

    def _noted(self, name: str, call: Any) -> Any:
        def made(owner: Any, *arguments: Any) -> Any:
            self.made.append((name, arguments))
            return call(owner, *arguments)

        return made

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [arguments for one, arguments in self.made if one == name]


@pytest.fixture
def calls(shared, monkeypatch):
    return Calls(monkeypatch)


# -- calls


def test_an_idle_engine_makes_no_call(engine, calls):
    """FastDeploy's transfer processes poll their queue, and meet at barriers."""
    one = engine(gpu=4, cpu=4, file=True)
    one.serve("a", A[:8])
    one.manager.free_block_ids(1)
    calls.made.clear()
    time.sleep(QUIET)
    one.manager.serve_status()
    assert calls.made == []


def test_without_a_match_nothing_is_read(engine, calls):
    one = engine(gpu=6, cpu=2, file=True)
    one.serve("a", A)
    calls.made.clear()
    assert one.match(Request("b", B))[:2] == ([], 0)
    assert {name for name, _ in calls.made} == {"ask"}
    assert one.free_blocks == [4, 5], "no block was taken for a read"


@pytest.mark.parametrize(("staging", "batches"), [(1, [[0], [0]]), (2, [[0, 1]]), (8, [[0, 1]])])
def test_only_the_tail_is_copied_and_written_from_its_slots(engine, calls, staging, batches):
    one = engine(gpu=8, file=True, options={"staging_slots": staging})
    one.serve("a", A[:8])
    stored = set(SharedStore.pool)
    calls.made.clear()
    request = Request("b", A)
    one.prefill(request)
    one.manager.write_cache_to_storage(request)
    tail = request.block_tables[2:]
    copies = calls.named("to_host")
    assert [block for blocks, _ in copies for block in blocks] == tail
    assert [list(slots) for _, slots in copies] == batches
    memory = one.manager._cache.lower.writes._copies.memory
    places = [
        [np.frombuffer(view, np.uint8).ctypes.data for view in views]
        for _, views, _ in calls.named("write")
    ]
    assert places == [[memory.address + slot * memory.stride for slot in some] for some in batches]
    assert len(set(SharedStore.pool) - stored) == 2
    one.free(request)


def test_the_waits_of_a_match_for_storage_are_limited_together(engine, shared, monkeypatch):
    """Each block is read by itself, for want of slots. The wait for every single one is short."""
    options = {"fetch_wait_s": 0.3}
    one, other = (engine(gpu=6, cpu=1, file=True, options=options) for _ in range(2))
    one.serve("a", list(range(20)))
    read = shared.read

    async def slow(*arguments):
        await asyncio.sleep(0.2)
        return await read(*arguments)

    monkeypatch.setattr(shared, "read", slow)
    request = Request("b", list(range(21)))
    assert other.match(request)[1] <= 8, "two reads take longer than all may"
    assert not other.wrong(request, 0)


# -- results that are no bytes


@pytest.mark.parametrize(
    ("error", "raises"), [(RuntimeError("a fault"), True), (TimeoutError("late"), False)]
)
def test_the_hold_of_a_write_ends_with_an_exception(engine, monkeypatch, error, raises):
    """Otherwise its blocks are never free again."""
    one = engine(gpu=4, file=True, options={"storage": {"timeout_s": 60.0}})
    request = Request("a", A[:8])
    one.prefill(request)

    def fail(*_: Any) -> int:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(FinishWrites, "write", fail)
        expected = pytest.raises(RuntimeError) if raises else nullcontext()
        with expected:
            one.manager.write_cache_to_storage(request)
    one.free(request)
    assert one.available == 4, "the blocks are not held any more"
    again = Request("b", A[:8])
    one.prefill(again)
    one.manager.reset()
    assert one.free_blocks == [0, 1, 2, 3]
