"""A device tier without actors hits as LRU does by theory, and as a replay does under RETAIN."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.scenario.sweep import Arrivals, DeviceTier, hit_curve, read_paths, retain_hits
from tests.scenario.test_sweep import chained, paths_of
from tests.support.traces import SHORT, read


@settings(max_examples=40)
@given(trace=chained(), size=st.integers(1, 12))
def test_without_statistics_it_is_lru(trace, size):
    device = DeviceTier(size)
    hits = sum(device.request(np.array(ids, np.uint32), 0.0) for ids in trace)
    curve = hit_curve(paths_of(trace), size)
    assert hits == curve.hits[min(size, len(curve.hits) - 1)]
    assert device.refused == curve.refused
    device.tree.check()


def test_the_last_block_of_a_prompt_is_computed_again_if_asked_for():
    paths = read_paths(np.array(ids, "u8") for ids in ([0, 1], [0, 1], [0, 1]))
    arrivals = Arrivals(np.arange(3.0), np.full(3, 10))
    assert retain_hits(paths, arrivals, 2) == 4
    assert retain_hits(paths, arrivals, 2, whole=False) == 2


def test_progress_is_reported_from_time_to_time():
    paths = read_paths(np.array([one], "u8") for one in range(600))
    seen: list[int] = []
    retain_hits(
        paths, Arrivals(np.arange(600.0), np.zeros(600, np.int64)), 10, progress=seen.append
    )
    assert seen == [256, 512]


def test_retain_hits_more_than_lru_on_the_first_requests():
    requests = list(read(SHORT))
    paths = read_paths(np.array(one.ids, "u8") for one in requests)
    arrivals = Arrivals(
        np.array([one.now for one in requests]), np.array([one.output for one in requests])
    )
    rate = retain_hits(paths, arrivals, 1000) / len(paths.blocks)
    assert rate > 1.5 * hit_curve(paths).rate(1000)
