"""The benchmark of `TierCache` runs."""

from __future__ import annotations

from kvactors.bench import tiers


def test_a_quick_run_reports_in_the_common_form():
    report = tiers.run(quick=True)
    assert (report["name"], report["settings"]["quick"]) == ("tiers", True)
    assert len(report["rows"]) == len({row["case"] for row in report["rows"]}) == 8
    assert all(row["ours"] > 0 and row["limit"] > 0 for row in report["rows"])
