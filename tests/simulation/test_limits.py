"""Limits of simulated systems: all small, all in effect, and restored afterwards."""

from __future__ import annotations

import importlib
import random

import pytest

from kvactors.errors import ConfigError
from kvactors.testing.plan import FaultPlan
from tests.simulation.command import run_simulate
from tests.simulation.draw import CRASHES, draw_run
from tests.simulation.limits import LIMITS, STEP, draw_limit, limited
from tests.simulation.run import run_seed


def test_a_limit_takes_every_value_from_1_to_64():
    rng = random.Random(1)
    assert {draw_limit(rng) for _ in range(20_000)} == set(range(1, 65))


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


def test_the_ledger_and_the_index_get_a_small_limit(monkeypatch):
    from kvactors.flush_notifier.ledger import Ledger
    from kvactors.flush_notifier.view import SinkView
    from kvactors.prefix_index.tree import BlockIndex

    ledgers, indexes, steps = [], [], set()
    make_ledger, make_index, take = Ledger.__init__, BlockIndex.__init__, SinkView.take

    def ledger(self, *arguments, **options):
        make_ledger(self, *arguments, **options)
        ledgers.append(self.tree.idle_limit)

    def index(self, block_size, blocks, bound, **options):
        make_index(self, block_size, blocks, bound, **options)
        indexes.append(bound)

    def taken(self, *arguments):
        steps.add(self.tree.step)
        return take(self, *arguments)

    monkeypatch.setattr(Ledger, "__init__", ledger)
    monkeypatch.setattr(SinkView, "take", taken)
    monkeypatch.setattr(BlockIndex, "__init__", index)
    drawn = draw_run(2)
    device, host = drawn.config.device.num_blocks, drawn.config.host
    report = run_seed(
        2, drawn._replace(limits=dict.fromkeys(drawn.limits, 3), plan=FaultPlan(), again=False)
    )
    assert report.violations == []
    assert ledgers == [device + host.slots + host.transit_slots + 3]
    assert indexes == [device + host.slots + 3]
    assert steps == {3}


@pytest.mark.parametrize(
    "options",
    [
        {"seeds": -1},
        {"seeds": 0},
        {"first": -1},
        {"processes": 0},
        {"minutes": 0.0},
        {"minutes": float("nan")},
        {"seed": -3},
    ],
)
def test_counts_that_cannot_be_are_refused(options, capfd):
    with pytest.raises(ConfigError, match=f"--{next(iter(options))} must be"):
        run_simulate(**options)
    assert capfd.readouterr().out == ""
