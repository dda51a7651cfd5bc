"""Plans of faults: their contents, drawing, and formats."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kvactors.errors import ConfigError
from kvactors.testing.faults import LASTING, STEPPED, Fault
from kvactors.testing.plan import DRAWN, FaultPlan
from tests.simulation.targets import Targets, aims, draw, possible

ALL = Targets(("prefix_index", "cpu_evictor"), ("sink-0", "sink-1"), ranks=2, clients=3, store=True)
LOCAL = ALL._replace(ranks=1)


def plans(targets, most=6):
    """A Hypothesis strategy: plans of at most `most` faults, simplest first."""

    def fault(kind):
        counted = st.integers(1, targets.steps).map(float)
        timed = st.floats(0, targets.span, allow_nan=False).map(lambda at: round(at, 4))
        lasting = st.floats(0, 3.0, allow_nan=False).map(lambda length: round(length, 4))
        return st.builds(
            Fault,
            st.just(kind),
            counted if kind in STEPPED else timed,
            st.sampled_from(aims(kind, targets)),
            lasting if kind in LASTING else st.just(0.0),
            st.integers(1, 8),
        )

    one = st.sampled_from(possible(targets)).flatmap(fault)
    return st.lists(one, max_size=most).map(
        lambda faults: FaultPlan(tuple(sorted(faults, key=lambda f: f.at)))
    )


def test_a_plan_is_read_from_toml(tmp_path):
    file = tmp_path / "plan.toml"
    file.write_text(
        '[[fault]]\nkind = "copy_hang"\nat = 0.5\nduration = 2.0\n[[fault]]\nkind = "actor_crash"\nat = 7\ntarget = "cpu_evictor"\n'
    )
    assert FaultPlan.from_toml(file) == FaultPlan(
        (Fault("copy_hang", 0.5, duration=2.0), Fault("actor_crash", 7.0, "cpu_evictor"))
    )


@pytest.mark.parametrize(
    "text",
    [
        '[[fault]]\nkind = "copy_hung"',
        '[[fault]]\nkind = "copy_fail"\nwhen = 1',
        '[[fault]]\nkind = "copy_fail"\nat = -1.0',
        '[[fault]]\nkind = "copy_fail"\namount = 0',
        '[[fault]]\nkind = "cancel"\nat = 0.5',
        '[[fault]]\nkind = "copy_hang"\nduration = inf',
        "[[fault]]",
    ],
)
def test_a_plan_that_cannot_be_is_a_named_error(tmp_path, text):
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        FaultPlan.from_toml(file)


def test_bad_json_is_a_named_error():
    with pytest.raises(ConfigError):
        FaultPlan.from_json("{")
    with pytest.raises(ConfigError):
        FaultPlan.from_json('{"fault":[{"kind":"cancel","at":0.5}]}')


def test_the_same_seed_draws_the_same_plan():
    one, two, other = (draw(random.Random(seed), 20, ALL) for seed in (1, 1, 2))
    assert one == two != other
    assert len(one.fault) == 20


def test_every_possible_kind_is_drawn_and_aims_at_existing_targets():
    for targets in (ALL, LOCAL):
        plan = draw(random.Random(0), 2_000, targets)
        plan.check()
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


@hypothesis_settings(max_examples=50, deadline=None)
@given(plans(ALL))
def test_plans_travel_as_json(plan):
    plan.check()
    assert FaultPlan.from_json(plan.to_json()) == plan
    assert all(fault.at >= 1 for fault in plan.fault if fault.kind in STEPPED)
