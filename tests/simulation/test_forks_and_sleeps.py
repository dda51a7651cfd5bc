"""Forks, and sleeps of the whole cache, under faults. Every branch has its own bytes, and nothing
is left when the cache is at rest."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import run_seed, workload
from tests.simulation.workload import Extra


@pytest.mark.parametrize("first", [0, 10, 20, 330])
def test_nothing_is_violated(first, monkeypatch):
    monkeypatch.setattr(workload, "EXTRA", Extra(forks=0.6, sleeps=0.5))
    some = [run_seed(seed) for seed in range(first, first + 10)]
    assert {one.seed: one.violations for one in some if one.violations} == {}
    seen: Counter[str] = sum((Counter(one.seen) for one in some), Counter())
    for what in ("forked", "branch computed", "slept 1", "slept 2"):
        assert seen[what], what
