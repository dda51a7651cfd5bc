"""Forks, sleeps, quotas, hints, pins and clears of one salt under faults. Every branch has its own
bytes, every eviction keeps the rules, and nothing is left when the cache is at rest."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import run_seed

REACHED = ("forked", "branch computed", "pinned", "clear salt compared", "evictions by a quota")


@pytest.mark.parametrize("first", [0, 34, 330])
def test_nothing_is_violated(first):
    some = [run_seed(seed, sharing=True) for seed in range(first, first + 14)]
    assert {one.seed: one.violations for one in some if one.violations} == {}
    seen: Counter[str] = sum((Counter(one.seen) for one in some), Counter())
    assert [what for what in REACHED if not seen[what]] == []
    assert seen["slept 1"] + seen["slept 2"]
