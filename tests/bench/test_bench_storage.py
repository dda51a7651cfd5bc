"""The benchmarks of storage run, and the fault table has no row that fails."""

from __future__ import annotations

from kvactors.bench import faults, store


def test_the_store_reports_both_directions_beside_plain_threads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = store.run(quick=True)
    cases = [row["case"] for row in report["rows"]]
    assert {"64 KiB blocks, write", "64 KiB blocks, read", "start-up scan of 1,000 slots"} <= set(
        cases
    )
    assert all(row["ours"] > 0 for row in report["rows"])
    assert list(tmp_path.iterdir()) == []


def test_every_fault_ends_as_it_should():
    report = faults.run(quick=True)
    assert len(report["rows"]) == 11
    assert {row["case"]: row["ratio"] for row in report["rows"]} == {
        row["case"]: 1.0 for row in report["rows"]
    }
