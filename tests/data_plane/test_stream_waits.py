"""The copies that an engine's stream waits for, without a driver."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

from kvactors.data_plane.base import Direction
from kvactors.data_plane.cuda.engine import CudaCopyEngine


def copies(*ops: tuple[list[int], list[int]], **state: bool) -> tuple[Any, list[tuple[Any, ...]]]:
    """An engine with copies of (blocks, events) in flight, by layers 0 to 1 and 2, and the calls
    of the driver."""
    calls: list[tuple[Any, ...]] = []
    lane = object()
    flags = {"lane": lane, "submitted": True, "over": False, "failed": False, **state}
    engine: Any = CudaCopyEngine.__new__(CudaCopyEngine)
    engine._lanes = {Direction.TO_DEVICE: lane}
    groups = [range(2), range(2, 3)]
    engine._in_flight = [
        SimpleNamespace(blocks=blocks, events=events, groups=groups, **flags)
        for blocks, events in ops
    ]
    driver = SimpleNamespace(call=lambda *arguments: calls.append(arguments))
    engine.device = SimpleNamespace(current=nullcontext, driver=driver)
    return engine, calls


def test_a_stream_waits_for_the_layer_of_each_copy():
    engine, calls = copies(([1, 2], [10, 11]), ([3], [20, 21]), ([4], [30, 31]))
    assert engine.make_stream_wait(7, [2, 3], 2)
    assert calls == [("cuStreamWaitEvent", 7, 11, 0), ("cuStreamWaitEvent", 7, 21, 0)]
    calls.clear()
    assert engine.make_stream_wait(7, [4], 1)
    assert calls == [("cuStreamWaitEvent", 7, 30, 0)]


def test_a_stream_does_not_wait_for_blocks_that_no_copy_brings():
    engine, calls = copies(([1, 2], [10, 11]))
    assert not engine.make_stream_wait(7, [2, 3], 0)
    assert calls == []


def test_a_stream_does_not_wait_for_copies_that_have_not_begun_or_have_failed():
    for state in ({"submitted": False}, {"failed": True}, {"over": True}):
        engine, calls = copies(([1], [10, 11]), **state)
        assert not engine.make_stream_wait(7, [1], 0)
        assert calls == []
