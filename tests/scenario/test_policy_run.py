"""A device tier without actors hits as LRU does by theory, and as a replay does under RETAIN."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.scenario.sweep import DeviceTier, read_paths, retain_hits, uses_of
from kvactors.scenario.trace import TraceRequest
from tests.scenario.test_sweep import chained, paths_of
from tests.support.traces import SHORT, read


@settings(max_examples=40)
@given(trace=chained(), size=st.integers(1, 12))
def test_without_statistics_it_is_lru(trace, size):
    device = DeviceTier(size)
    hits = sum(device.request(np.array(ids, np.uint32), 0.0) for ids in trace)
    curve = uses_of(paths_of(trace), size)
    assert hits == curve.hits[min(size, len(curve.hits) - 1)]
    assert device.refused == curve.refused
    device.tree.check()


def requests_of(*paths, output=10):
    """A request a second, and the paths of all."""
    made = [
        TraceRequest(float(at), output, np.array(ids, np.uint64)) for at, ids in enumerate(paths)
    ]
    return read_paths(one.ids for one in made), made


def test_the_last_block_of_a_prompt_is_computed_again_if_asked_for():
    paths, requests = requests_of([0, 1], [0, 1], [0, 1])
    assert retain_hits(paths, requests, 2) == 4
    assert retain_hits(paths._replace(whole=False), requests, 2) == 2


def test_progress_is_reported_from_time_to_time():
    seen: list[int] = []
    retain_hits(*requests_of(*([one] for one in range(600)), output=0), 10, progress=seen.append)
    assert seen == [256, 512]


def test_retain_hits_more_than_lru_on_the_first_requests():
    requests = [
        TraceRequest(one.now, one.output, np.array(one.ids, np.uint64)) for one in read(SHORT)
    ]
    paths = read_paths(one.ids for one in requests)
    rate = retain_hits(paths, requests, 1000) / len(paths.blocks)
    assert rate > 1.5 * uses_of(paths).rate(1000)
