"""The scenario of a noisy tenant, with both eviction policies."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvactors.scenario.runner import run_scenario

FILE = Path(__file__).parents[2] / "scenarios" / "noisy_tenant.toml"


@pytest.mark.parametrize("policy", ["lru", "retain"])
def test_the_quiet_tenant_keeps_its_hits(policy):
    data = tomllib.loads(FILE.read_text())
    data["device"]["policy"] = policy
    if policy == "retain":  # which keeps blocks that were hit once, even without a quota
        for step in data["workload"]["step"]:
            if step["request"] == "quiet-3":
                step.pop("cached_tokens", None)
    _, report = run_scenario(data, virtual=True)
    assert report.errors == []
    assert report.requests == 29
