"""Scenario files: the accepted settings, and the errors about others."""

from __future__ import annotations

import math

import pytest

from kvactors.errors import ConfigError
from kvactors.scenario.report import Report
from kvactors.scenario.spec import Bound, Scenario, outcomes

BASE = {"scenario": {"name": "s"}}
MEMORY = {"flush": {"sinks": [{"kind": "memory"}]}}


def report(**changes):
    fields = {
        "name": "s",
        "requests": 10,
        "rejected": 0,
        "no_room": 2,
        "blocks_looked_up": 100,
        "hit_rate": {"device": 0.5, "host": 0.25, "storage": 0.0, "total": 0.75},
        "verified_blocks": 25,
        "corrupt_blocks_served": 0,
        "flush": {"resident": 3, "gone": 1, "delivered": 4, "pending": 0, "divergence": 0},
        "loop_lag_ms": {"p50": 0.1, "p99": 0.2, "p999": 0.3},
        "messages": 50,
        "wall_s": 1.0,
        "errors": [],
    }
    return Report(**{**fields, **changes})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"workload": {"sesions": 3}}, r"unknown key 'workload\.sesions'. Did you mean 'sessions'"),
        ({"wrkload": {}}, r"unknown key 'wrkload'. Did you mean 'workload'"),
        ({"device": {"num_block": 3}}, r"device\.num_block.*num_blocks"),
        (
            {"workload": {"kind": "script", "step": [{"doo": "acquire"}]}},
            r"workload\.step\[0\]\.do is missing",
        ),
        ({"workload": {"kind": "walk"}}, "walk"),
        ({"workload": {"kind": "script"}}, r"workload\.step"),
        ({"workload": {"step": [{"do": "pause"}]}}, r"workload\.step"),
        ({"workload": {"turns": 0}}, r"workload\.turns"),
        ({"workload": {"system_tokens": -1}}, r"workload\.system_tokens"),
        (
            {
                "workload": {
                    "kind": "script",
                    "step": [{"do": "acquire", "request": "a", "tokens": -5}],
                }
            },
            r"workload\.step\[0\]\.tokens must be at least 1",
        ),
        ({"workload": {"kind": "script", "step": [{"do": "sleep", "level": 3}]}}, "level"),
        ({"device": {"num_blocks": 0}}, r"device\.num_blocks"),
        ({"scenario": {}}, "name"),
        ({"expect": {"requests": {"min": 3, "mx": 4}}}, r"'expect\.requests\.mx'"),
        ({"expect": {"requests": math.nan}}, r"expect\.requests must be a finite number, not nan"),
        ({"expect": {"requests": {"max": math.inf}}}, r"expect\.requests\.max must be a finite"),
        ({"expect": {"requests": "3"}}, r"expect\.requests must be a number or a table, not '3'"),
        ({"expect": {"requests": {}}}, r"expect\.requests: give min, max or both"),
        ({"expect": {"requests": {"min": 3, "max": 1}}}, r"requests: min 3 is above max 1"),
        ({"expect": {"requests.x": 1}}, r"expect\.requests\.x: reports have no such number"),
        ({"expect": {"name": 1}}, r"expect\.name: reports have no such number"),
        ({"expect": 3}, r"expect must be a table, not 3"),
        ({"expect": {"hitrate.host": 0}}, r"expect\.hitrate\.host"),
        ({"workload": {"think": -1}}, r"workload\.think"),
        (
            {"fault": [{"sink": "x", "kind": "down"}]},
            r"fault\[0\]: there is no sink 'x' \(sinks: none\)",
        ),
        (
            {"fault": [{"sink": "memory", "kind": "down", "at": -1}], **MEMORY},
            r"fault\[0\]\.at must be at least 0",
        ),
        (
            {"fault": [{"sink": "memory", "kind": "down", "turn": -1}], **MEMORY},
            r"fault\[0\]\.turn must be at least 0",
        ),
        (
            {"fault": [{"sink": "memory", "kind": "down", "turns": 1}], **MEMORY},
            r"fault\[0\]: turn counts from 1",
        ),
        (
            {"fault": [{"sink": "memory", "kind": "down", "turn": 1, "at": 1.0}], **MEMORY},
            r"fault\[0\]: turn counts from 1",
        ),
        (
            {"fault": [{"sink": "memory", "kind": "down", "turn": 3, "turns": 2}], **MEMORY},
            "must end before the last of 4 turns",
        ),
        ({"fault": [{"kind": "down"}]}, r"fault\[0\]: say either which sink"),
        (
            {"fault": [{"storage": True, "kind": "hang"}]},
            r"fault\[0\]: hang is no fault of storage",
        ),
        ({"fault": [{"storage": True, "kind": "full"}]}, r"fault\[0\]: there is no storage"),
        (
            {"fault": [{"storage": True, "kind": "bit_rot"}], "storage": {"backend": "memory"}},
            "bit_rot needs",
        ),
        ({"process": {"restarts": -1}}, "process.restarts"),
        ({"process": {"engines": 2}}, "process.engines above 1 needs a store that several nodes"),
        ({"fault": [{"sink": "memory", "kind": "explode"}], **MEMORY}, "explode"),
    ],
)
def test_bad_input_is_named(change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        Scenario.from_mapping({**BASE, **change})


def test_every_fault_of_a_file_is_found():
    bad = {"device": {"num_blcks": 1}, "fault": [{"kind": "down"}, {}], "expect": {"x": 1}}
    found = Scenario.check_mapping({**BASE, **bad})[1]
    named = ("device.num_blcks", "fault[1].kind", "expect.x")
    assert [name in text for name, text in zip(named, found, strict=True)] == [True] * 3


def test_expectations_may_be_dotted_or_nested():
    dotted = Scenario.from_mapping({**BASE, "expect": {"hit_rate.host": {"min": 0.1}, "errors": 0}})
    nested = Scenario.from_mapping(
        {**BASE, "expect": {"hit_rate": {"host": {"min": 0.1}}, "errors": 0}}
    )
    assert dotted.expect == nested.expect == {"hit_rate.host": Bound(min=0.1), "errors": 0}


def test_expectations_that_hold():
    expect = {
        "requests": 10.0,
        "hit_rate.host": Bound(min=0.25, max=0.25),
        "flush.gone": Bound(max=1),
        "errors": 0.0,
    }
    assert all(one.holds for one in outcomes(expect, report()))


@pytest.mark.parametrize(
    ("name", "wanted", "text"),
    [
        ("requests", 11.0, "requests is 10, and 11 was expected"),
        ("hit_rate.host", Bound(min=0.26), "hit_rate.host is 0.25, and at least 0.26 was expected"),
        ("hit_rate.host", Bound(max=0.24), "hit_rate.host is 0.25, and at most 0.24 was expected"),
        ("flush.gone", Bound(2, 3), "flush.gone is 1, and at least 2, at most 3 was expected"),
        ("errors", 1.0, "errors is 0, and 1 was expected"),
    ],
)
def test_expectations_that_do_not_hold_are_failures_beside_the_errors(name, wanted, text):
    found = report(expectations=outcomes({name: wanted, "no_room": 2.0}, report()), errors=["e"])
    assert found.failures() == [text, "e"]
    assert [one.holds for one in found.expectations] == [False, True]


@pytest.mark.parametrize("name", ["nonsense", "hit_rate.disk", "requests.x", "hit_rate", "name"])
def test_an_expectation_about_no_number_is_bad_input(name):
    with pytest.raises(ConfigError, match=name):
        outcomes({name: Bound(min=0)}, report())
