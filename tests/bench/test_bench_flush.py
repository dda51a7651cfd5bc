"""The benchmark of the flush path runs, and what it says of an evicted run is linear."""

from __future__ import annotations

from kvactors.bench import flush


def test_a_quick_run_reports_in_the_common_form():
    report = flush.run(quick=True)
    assert (report["name"], report["settings"]["quick"]) == ("flush", True)
    assert report["settings"]["changes"] >= 3000
    cases = {row["case"]: row for row in report["rows"]}
    assert len(cases) == len(report["rows"]) >= 12
    assert all(row["ours"] > 0 and row["limit"] > 0 for row in report["rows"])
    runs = [row for case, row in cases.items() if case.startswith("evicting a run")]
    assert [row["ratio"] for row in runs] == [1.0] * len(runs), "no token is handed over twice"
