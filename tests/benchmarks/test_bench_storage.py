"""The benchmark of storage runs."""

from __future__ import annotations

import json
import random
import statistics
import sys
from pathlib import Path

import pytest

from tests.benchmarks import store
from tests.benchmarks.__main__ import main
from tests.benchmarks.store_rounds import LEAST_ROUNDS, load_of, rounds_within
from tests.benchmarks.store_summary import PEER, counted, limit_of

STAND_IN = """#!{python}
import json, sys
from pathlib import Path
for line in sys.stdin:
    asked = json.loads(line)
    with Path({log!r}).open("a") as log:
        log.write(line)
    answer = {{}}
    if asked["do"] in ("write", "read"):
        answer = {{"seconds": 2.0, "processor": 1.0, "failed": {failed}}}
    print(json.dumps(answer), flush=True)
"""
"""A program in the place of a Python that has vLLM. Its tier takes 2 s for each direction."""


def test_the_store_reports_both_directions_beside_plain_threads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = store.run(quick=True)
    cases = [row["case"] for row in report["rows"]]
    assert {"64 KiB blocks, write", "64 KiB blocks, read", "start-up scan of 1,000 slots"} <= set(
        cases
    )
    assert all(row["ours"] > 0 for row in report["rows"])
    assert list(tmp_path.iterdir()) == []


def test_rounds_end_behind_their_seconds_but_for_the_least():
    assert list(rounds_within(9, 3600.0)) == list(range(9))
    assert list(rounds_within(9, -1.0)) == list(range(LEAST_ROUNDS))
    assert list(rounds_within(2, -1.0)) == [0, 1]


def test_the_report_names_the_loads_with_fewer_rounds():
    assert counted({}) == "0"
    assert counted({"a": 9, "b": 9}) == "9"
    assert counted({"a": 9, "b": 4, "c": 5}) == "9 (b 4, c 5)"


def test_the_limit_of_the_disk_is_no_lucky_variant():
    """Five equal variants of plain threads, and a store that is as fast. The best of their medians
    is above the store's by the noise."""
    noise, limits, best = random.Random(5), [], []
    for _ in range(60):
        ours, *plain = ([noise.gauss(1.0, 0.1) for _ in range(9)] for _ in range(6))
        limits.append(limit_of(ours, dict(zip("abcde", plain, strict=True))))
        best.append(max(map(statistics.median, plain)))
    assert statistics.mean(limit.rate for limit in limits) == pytest.approx(1.0, abs=0.015)
    assert statistics.mean(limit.ratio for limit in limits) == pytest.approx(1.0, abs=0.015)
    assert statistics.mean(best) > 1.03


def test_the_limit_of_the_disk_is_the_variant_with_the_best_median():
    slow, fast = [1.0, 9.0, 1.0, 1.0, 1.0], [2.0, 2.5, 2.0, 3.0, 2.0]
    limit = limit_of([1.0] * 5, {"slow": slow, "fast": fast})
    assert limit == (2.0, 0.5, "fast")
    assert limit_of([3.0], {"slow": [1.0], "fast": [2.0]}) == (2.0, 1.5, "fast")


def stand_in(folder: Path, log: Path, failed: int = 0) -> str:
    path = folder / "python"
    path.write_text(STAND_IN.format(python=sys.executable, log=str(log), failed=failed))
    path.chmod(0o755)
    return str(path)


def test_vllms_tier_takes_its_turn_in_every_round(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(store, "pool_rows", lambda **_: ([], {}))
    log = tmp_path / "log"
    report = store.run(quick=True, vllm_python=stand_in(tmp_path, log))
    load = load_of(64 << 10, 2 << 20)
    rows = {row["case"]: row for row in report["rows"]}
    for what in ("write", "read"):
        beside = rows[f"64 KiB blocks, {what}, beside vLLM"]
        assert (beside["limit_name"], beside["limit"]) == (PEER, pytest.approx(1.0486, rel=1e-3))
        assert rows[f"64 KiB blocks, {what}, processor time"]["limit"] == pytest.approx(
            1e9 / (2 << 20), rel=1e-3
        )
        spread = report["settings"][f"GB/s, 64 KiB blocks, {what}"]
        assert "vLLM's 0.00 to 0.00" in spread
        assert f"of vLLM's {beside['ratio']:.2f} " in spread
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["do"] for one in asked] == ["open", "write", "read", "close"]
    assert (asked[0]["size"], asked[0]["slots"]) == (64 << 10, load.slots)
    assert (asked[1]["count"], asked[1]["batch"]) == (load.objects, load.batch)
    assert list((tmp_path / "work").iterdir()) == []


def test_a_tier_whose_jobs_fail_gives_no_figures(tmp_path, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(RuntimeError, match="3 jobs of vLLM's fs tier failed"):
        store.run(quick=True, vllm_python=stand_in(tmp_path, tmp_path / "log", 3))


def test_a_python_without_vllm_is_a_named_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["store", "--quick", "--vllm-python", sys.executable]) == 2
    assert "ModuleNotFoundError" in capsys.readouterr().err
