"""The offline optimum: what an exhaustive search over all caches finds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.scenario.sweep import optimal_hits, read_paths, uses_of
from tests.scenario.test_sweep import chained, paths_of
from tests.support.traces import SHORT, read


def found(trace, size, device=None, *, whole=True):
    """The hits of the optimum."""
    return optimal_hits(uses_of(paths_of(trace, whole=whole), device), len(trace), size)


def searched(trace, size, *, whole=True):
    """The most hits of any sequence of contents, each of `size` blocks at most."""
    best = {frozenset(): 0}
    for ids in trace:
        after = {}
        for held, hits in best.items():
            hit = next((at for at, one in enumerate(ids) if one not in held), len(ids))
            hits += hit if whole else min(hit, len(ids) - 1)
            for many in range(size + 1):
                for kept in map(frozenset, combinations(sorted(held | set(ids)), many)):
                    after[kept] = max(after.get(kept, 0), hits)
        best = after
    return max(best.values())


@st.composite
def small(draw):
    """A short trace of few blocks."""
    trace = draw(chained())
    return [ids[:4] for ids in trace[:6]]


@settings(max_examples=30)
@given(trace=small(), size=st.integers(1, 3), whole=st.booleans())
def test_no_sequence_of_contents_hits_more(trace, size, whole):
    assert found(trace, size, whole=whole) == searched(trace, size, whole=whole)


def test_a_cache_of_every_block_hits_every_known_block():
    trace = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2]]
    assert found(trace, 5) == 2 + 0 + 3
    assert found(trace, 5, whole=False) == 2 + 0 + 2


def test_requests_larger_than_the_device_use_nothing():
    trace = [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1]]
    assert found(trace, 2, device=2) == 2
    assert found(trace, 3, device=3) == 2 + 3 + 2


def test_the_hit_rate_of_the_first_requests_lies_above_that_of_lru():
    paths = read_paths(np.array(one.ids, "u8") for one in read(SHORT))
    uses = uses_of(paths)
    rate = optimal_hits(uses, len(paths.ends), 1000) / len(paths.blocks)
    assert rate == pytest.approx(0.1790, abs=0.002)
    assert rate > 3 * uses_of(paths).rate(1000)
