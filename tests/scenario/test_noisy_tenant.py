"""Scenarios of a noisy tenant and of a cache that sleeps."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from kvactors.errors import ConfigError
from kvactors.scenario.runner import run_scenario
from kvactors.scenario.spec import Scenario, disappointments

FOLDER = Path(__file__).parents[2] / "scenarios"


def of_file(name):
    return tomllib.loads((FOLDER / f"{name}.toml").read_text())


def small():
    data = of_file("noisy_tenant")
    data["device"]["num_blocks"], data["quota"]["salts"]["noisy"]["device"] = 32, 8
    data["workload"] |= {"sessions": 10, "user_tokens": 33, "turns": 4, "flood": 6}
    return data


def test_the_quota_keeps_the_hits_of_the_quiet_tenant_under_both_policies():
    _, report = run_scenario(small(), virtual=True)
    assert report.errors == []
    rates = {case: rate["quiet"] for case, rate in report.tenants.items()}
    for policy in ("lru", "retain"):
        alone, flood, quota = (rates[f"{policy}_{case}"] for case in ("alone", "flood", "quota"))
        assert flood < alone - 0.3, "the flood does damage"
        assert quota >= alone - 0.05
    assert report.verified_blocks == report.blocks_looked_up


def test_a_quota_that_does_not_hold_is_not_as_expected(monkeypatch):
    data = small()
    monkeypatch.setattr("kvactors.scenario.runner.case_of", without_quota)
    scenario, report = run_scenario(data, virtual=True)
    assert any(
        "tenants.lru_quota.quiet" in line for line in disappointments(scenario.expect, report)
    )


def without_quota(scenario, policy, case):
    import msgspec

    from kvactors.settings.tables import QuotaConfig

    device = msgspec.structs.replace(scenario.device, policy=policy)
    return msgspec.structs.replace(scenario, device=device, quota=QuotaConfig())


@pytest.mark.parametrize(
    ("table", "change", "reason"),
    [
        ("workload", {"flood": 0}, "flood"),
        ("workload", {"kind": "chat"}, "flood"),
        ("quota", {"salts": {}}, "noisy"),
        ("quota", {"salts": {"noisy": {"device": 32}}}, "less than"),
        ("quota", {"salts": {"noisy": {"device": "1 MiB"}}}, "in blocks"),
        ("process", {"restarts": 1}, "no fault"),
    ],
)
def test_a_flood_without_a_comparison_is_refused(table, change, reason):
    data = small()
    data[table] = {**data.get(table, {}), **change}
    with pytest.raises(ConfigError, match=reason):
        run_scenario(data, virtual=True)


def test_a_cache_sleeps_and_its_blocks_are_found_below():
    data = of_file("sleep")
    scenario, report = run_scenario(data, virtual=True)
    assert disappointments(scenario.expect, report) == []
    assert report.verified_blocks == 60


@pytest.mark.parametrize("step", [{"do": "wake", "level": 2}, {"do": "sleep", "level": 3}])
def test_a_level_is_of_a_sleep(step):
    data = of_file("sleep")
    data["workload"]["step"] = [step]
    with pytest.raises(ConfigError, match="level"):
        Scenario.from_mapping(data)
