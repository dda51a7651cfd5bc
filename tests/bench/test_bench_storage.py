"""The benchmark of storage runs."""

from __future__ import annotations

from kvactors.bench import store


def test_the_store_reports_both_directions_beside_plain_threads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = store.run(quick=True)
    cases = [row["case"] for row in report["rows"]]
    assert {"64 KiB blocks, write", "64 KiB blocks, read", "start-up scan of 1,000 slots"} <= set(
        cases
    )
    assert all(row["ours"] > 0 for row in report["rows"])
    assert list(tmp_path.iterdir()) == []
