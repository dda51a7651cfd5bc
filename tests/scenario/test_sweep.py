"""Hit rates from one pass over a trace: equal to a plain LRU cache of each size, and to replays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.errors import ConfigError
from kvactors.scenario.replay import ReplayConfig
from kvactors.scenario.sweep import rates_of, read_paths, sizes_to_show, uses_of


@st.composite
def chained(draw):
    """Requests whose ids are chained: each continues a beginning of an earlier one."""
    made, trace = 0, [[]]
    for _ in range(draw(st.integers(0, 25))):
        base = draw(st.sampled_from(trace))
        base = base[: draw(st.integers(0, len(base)))]
        grow = draw(st.integers(0 if base else 1, 6))
        trace.append([*base, *range(made, made + grow)])
        made += grow
    return trace[1:]


def lru(trace, size, *, device=None, whole=True):
    """Hits of a plain list in the order of use, and the refused requests."""
    recent, hits, refused = [], 0, 0
    for ids in trace:
        if device is not None and len(ids) > device:
            refused += 1
            continue
        kept = recent[:size]
        found = next((depth for depth, block in enumerate(ids) if block not in kept), len(ids))
        hits += found if whole else min(found, len(ids) - 1)
        recent = ids + [block for block in recent if block not in ids]
    return hits, refused


def paths_of(trace, *, whole=True):
    # Ids far apart and in no order: they are names and no positions.
    names = (np.array([(i * 0x9E3779B97F4A7C15) % 2**64 for i in ids], "u8") for ids in trace)
    return read_paths(names, whole=whole)


@given(trace=chained(), whole=st.booleans(), device=st.none() | st.integers(1, 12))
def test_a_curve_equals_a_plain_lru_cache_of_every_size(trace, whole, device):
    paths = paths_of(trace, whole=whole)
    curve = uses_of(paths, device)
    assert curve.looked_up == sum(map(len, trace))
    for size in range(1, paths.distinct + 2):
        hits, refused = lru(trace, size, device=device, whole=whole)
        assert curve.refused == refused
        assert curve.rate(size) == hits / max(1, curve.looked_up)


TRACE = [[0, 1, 2], [0, 1, 3, 4], [5], [0, 1, 2, 6, 7, 8], [0, 1, 3, 4], [5, 9], [0, 1, 2, 6]] * 3


def test_a_trace_that_is_not_chained_is_named():
    with pytest.raises(ConfigError, match="request 1: block 7 follows another block"):
        read_paths(np.array(ids, "u8") for ids in ([3, 7], [4, 7]))
    with pytest.raises(ConfigError, match="request 2: block 3 follows"):
        read_paths(np.array(ids, "u8") for ids in ([3, 7], [], [4, 3]))


def test_no_requests_have_no_hits():
    paths = read_paths([])
    assert (paths.longest, uses_of(paths).rate(10)) == (0, 0.0)
    config = ReplayConfig.from_mapping({"device": {"num_blocks": 5}})
    assert not any(rates_of(paths, config).values())


def test_the_smallest_size_with_a_share_of_the_hits():
    curve = uses_of(read_paths(np.array(ids, "u8") for ids in TRACE))
    for share in (0.5, 0.9, 1.0):
        size, most = curve.size_for(share), curve.rate(10**9)
        assert curve.rate(size) >= share * most > curve.rate(size - 1)


def test_sizes_rise_to_the_whole_trace():
    assert sizes_to_show(1) == [1]
    shown = sizes_to_show(182_790)
    assert (shown[0], shown[-1]) == (1, 182_790)
    assert shown == sorted(set(shown))
