"""The verbs of a script are the calls of the API."""

from __future__ import annotations

import inspect
import math
import tomllib
import typing
from pathlib import Path

import pytest

from kvactors import errors
from kvactors.cache import KVCache
from kvactors.errors import ConfigError
from kvactors.lease import Lease
from kvactors.scenario.runner import run_scenario
from kvactors.scenario.spec import Scenario
from kvactors.scenario.steps import AnyStep, LeaseStep, Outcome

VERBS = {str(step.__struct_config__.tag): step for step in typing.get_args(AnyStep)}
ENGINE = {"wait_ready", "pass_end", "hashes"}  # the reference engine makes these calls
INSPECTION = {
    *("statistics", "tenants", "health", "check", "check_slices", "count_divergent_blocks"),
    *("free_blocks", "lookup_slices"),
}
OTHERS = {
    *("set_num_blocks", "close"),  # a scenario has the number, and ends its cache
    *("step", "record_pass", "wait_layer"),  # about passes of a device
}
CHANGED = {
    "extra_keys": "media",
    "request_id": "request",
    "request_ids": "children",
    "count": "children",
}
OF_DEVICES = {"event", "stream"}


def calls(owner):
    return {
        name: inspect.signature(one)
        for name, one in inspect.getmembers(owner, inspect.isfunction)
        if not name.startswith("_")
    }


def test_every_call_of_the_api_is_a_verb():
    found = calls(KVCache) | calls(Lease)
    assert set(VERBS) == set(found) - ENGINE - INSPECTION - OTHERS


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_has_the_parameters_of_its_call(verb):
    step = VERBS[verb]
    owner = Lease if issubclass(step, LeaseStep) or verb == "abandon" else KVCache
    known = set(calls(owner)[verb].parameters) - {"self"} - OF_DEVICES
    if verb == "wake":
        known -= {"device"}
    if verb == "fork":
        known = {"child" if name == "request_id" else name for name in known}
    fields = set(step.__struct_fields__)
    assert {CHANGED.get(name, name) for name in known} <= fields
    results = {"expect", "cached_tokens", "hits", "blocks", "pinned_blocks"}
    texts = {"prompt", "tokens", "media"} if "tokens" in fields else set()
    assert fields - known - results - texts - {"request", "child", "children"} == set()


def test_an_expected_error_is_one_of_the_package():
    names = set(typing.get_args(Outcome)) - {"ok", "ValueError"}
    assert names <= set(vars(errors))


ACQUIRE = {"do": "acquire", "request": "a", "tokens": 8}


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ([{"do": "acquire", "tokens": 4}], r"workload\.step\[0\]\.request is missing"),
        ([{"do": "acquir"}], r"unknown workload\.step\[0\]\.do 'acquir'\. Did you mean 'acquire'"),
        ([ACQUIRE, {"do": "finish", "request": "b"}], r"step\[1\].*no step before it acquires 'b'"),
        ([ACQUIRE, ACQUIRE], r"step\[1\]: 'a' has a lease"),
        ([ACQUIRE, {"do": "fork", "request": "a", "child": "a"}], r"step\[1\]: 'a' has a lease"),
        ([ACQUIRE, {"do": "abandon", "request": "a", "deadline": 1.0}], r"step\[1\]\.deadline"),
        ([{**ACQUIRE, "hints": {"priority": 9}}], r"step\[0\]\.hints: hints\.priority"),
        ([{**ACQUIRE, "hints": {"prio": 1}}], r"step\[0\]\.hints\.prio'"),
        ([{**ACQUIRE, "expect": "NoRom"}], r"step\[0\]\.expect 'NoRom'\. Did you mean 'NoRoom'"),
        ([ACQUIRE, {**ACQUIRE, "tokens": 1 << 25}], r"step\[1\]\.tokens must be at most"),
        ([{**ACQUIRE, "hits": [1]}], r"step\[0\]\.hits must have 3 values, not 1"),
        ([{**ACQUIRE, "hits": [1, -1, 0]}], r"step\[0\]\.hits\[1\] must be at least 0, not -1"),
        ([{**ACQUIRE, "hints": {"ttl": math.nan}}], r"hints\.ttl must be a finite number"),
        ([{**ACQUIRE, "media": [{"offset": 0}]}], r"step\[0\]\.media\[0\]\.length is missing"),
        (
            [ACQUIRE, {"do": "fork_many", "request": "a", "children": ["b", "b"]}],
            r"step\[1\]\.children: 'b' is there twice",
        ),
        ([{"do": "resync", "sink": "x"}], r"step\[0\]: there is no sink 'x' \(sinks: memory\)"),
        ([{"do": "wait_flushed", "sinks": ["x"]}], r"step\[0\]: there is no sink 'x'"),
        (
            [{"do": "set_quota", "salt": "s", "device": "8 Gix"}],
            r"step\[0\]\.device must be a size",
        ),
    ],
)
def test_bad_steps_are_refused_with_their_place(steps, complaint):
    data = {
        "scenario": {"name": "s"},
        "flush": {"sinks": [{"kind": "memory"}]},
        "workload": {"kind": "script", "step": steps},
    }
    with pytest.raises(ConfigError, match=complaint):
        Scenario.from_mapping(data)


def test_a_name_is_free_after_its_lease_has_ended_or_was_refused():
    steps = [{**ACQUIRE, "expect": "NoRoom"}, ACQUIRE, {"do": "preempt", "request": "a"}, ACQUIRE]
    workload = {"kind": "script", "step": steps}
    Scenario.from_mapping({"scenario": {"name": "s"}, "workload": workload})


def test_the_example_of_the_page_holds():
    page = (Path(__file__).parents[2] / "docs" / "reference" / "scenarios.md").read_text("utf-8")
    example = page.partition("```toml\n")[2].partition("```")[0]
    _, report = run_scenario(tomllib.loads(example), virtual=True)
    assert [one.holds for one in report.expectations] == [True] * 3
