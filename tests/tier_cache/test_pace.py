"""Pauses between empty steps, so that fetches are not starved by an engine that only waits."""

from __future__ import annotations

import pytest

from kvactors.tier_cache import waits
from kvactors.tier_cache.waits import EMPTY_STEP, PAUSE, StepPace


@pytest.fixture
def clock(monkeypatch):
    """The time and the pauses of the steps."""
    clock = {"now": 100.0, "pauses": []}

    def sleep(seconds):
        clock["pauses"].append(seconds)
        clock["now"] += seconds

    monkeypatch.setattr(waits.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(waits.time, "sleep", sleep)
    return clock


def test_a_step_that_computes_is_followed_by_no_pause(clock):
    steps = StepPace()
    for _ in range(10):
        clock["now"] += 2 * EMPTY_STEP
        steps.step_ended()
    assert clock["pauses"] == []


def test_each_empty_step_after_the_first_is_followed_by_a_pause(clock):
    steps = StepPace()
    for _ in range(10):
        clock["now"] += 0.1 * EMPTY_STEP
        steps.step_ended()
    assert clock["pauses"] == [PAUSE] * 9
