"""Plans of faults: their contents, drawing, and formats."""

from __future__ import annotations

import random

from kvactors.testing.plan import DRAWN
from tests.simulation.targets import Targets, aims, draw, possible

ALL = Targets(("prefix_index", "cpu_evictor"), ("sink-0", "sink-1"), ranks=2, clients=3, store=True)
LOCAL = ALL._replace(ranks=1)


def test_the_same_seed_draws_the_same_plan():
    one, two, other = (draw(random.Random(seed), 20, ALL) for seed in (1, 1, 2))
    assert one == two != other
    assert len(one.fault) == 20


def test_every_possible_kind_is_drawn_and_aims_at_existing_targets():
    for targets in (ALL, LOCAL):
        plan = draw(random.Random(0), 2_000, targets)
        assert {fault.kind for fault in plan.fault} == set(possible(targets))
        assert all(fault.target in aims(fault.kind, targets) for fault in plan.fault)
        assert [fault.at for fault in plan.fault] == sorted(fault.at for fault in plan.fault)
    assert set(possible(ALL)) | set(possible(LOCAL)) == set(DRAWN)


def test_absent_components_have_no_faults():
    assert set(possible(Targets())) == {
        "copy_fail",
        "copy_slow",
        "copy_hang",
        "cancel",
        "clock_jump",
    }
