"""Limits of simulated systems: all small, all in effect, and restored afterwards."""

from __future__ import annotations

import importlib

import pytest

from tests.simulation.draw import CRASHES, draw_run
from tests.simulation.limits import LIMITS, STEP, limited


def test_every_run_has_limits_from_1_to_64():
    for seed in range(300):
        drawn = draw_run(seed)
        config = drawn.config
        found = [
            *drawn.limits.values(),
            config.actors.channel_bound,
            config.actors.max_restarts_per_minute,
            config.flush.batch,
            config.host.transit_slots,
        ]
        assert all(1 <= one <= 64 for one in found), (seed, found)
        assert drawn.limits.keys() == {*LIMITS, STEP}
        assert 0 <= config.host.slots <= 64
        assert 0 <= drawn.capacity <= 64
        crashes = sum(fault.kind == "actor_crash" for fault in drawn.plan.fault)
        assert crashes <= min(CRASHES, config.actors.max_restarts_per_minute), (
            "a plan must not spend the restart budget"
        )


@pytest.mark.parametrize("name", LIMITS)
def test_a_limit_is_replaced_and_restored(name):
    module, constant = LIMITS[name]
    before = getattr(importlib.import_module(module), constant)
    with limited({name: 7}):
        assert getattr(importlib.import_module(module), constant) == 7
    assert getattr(importlib.import_module(module), constant) == before
