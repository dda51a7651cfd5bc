"""The benchmark of service runs."""

from __future__ import annotations

import json
import sys

from tests.benchmarks import service

STAND_IN = """#!{python}
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    open({log!r}, "a").write(line)
    answer = {{"blocks": 12, "seconds": 2.0}} if asked["do"] not in ("open", "close") else {{}}
    print(json.dumps(answer), flush=True)
"""
"""A program in the place of a Python that has vLLM. Its tiers move 12 blocks in 2 s."""


def test_whole_prompts_come_back_and_are_stored_and_a_peer_does_the_same_work(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, log=str(log)))
    python.chmod(0o755)
    report = service.run(quick=True, vllm_python=str(python))
    rows = {row["case"]: row for row in report["rows"]}
    assert len(rows) == len(report["rows"])
    shares = {case: row["ours"] for case, row in rows.items() if case.endswith("share")}
    assert len(shares) == 13 + 5
    assert set(shares.values()) == {100.0}
    beside = rows["6 x 128 tokens, 1 at once, host absent, beside vllm, share"]
    assert (beside["limit"], beside["ratio"]) == (25.0, 4.0)
    rate = rows["6 x 128 tokens, 1 at once, host absent, beside vllm"]
    assert rate["limit"] == round(12 * service.SIZE / 2.0 / 1e6, 4)
    assert all(row["limit"] > 0 for row in report["rows"])
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert [one["do"] for one in asked] == [
        *("open", "save", "close", *("open", "back", "close") * 2),
        *("open", "save", "close", *("open", "back", "close") * 2),
        *("open", "finish", "close"),
    ]
    assert [one["at_once"] for one in asked if one["do"] == "back"] == [1] * 4
    slots = {one["slots"] for one in asked if one["do"] == "open"}
    assert slots == {service.TRANSIT, service.TRANSIT + 16}, "as much host memory as ours"
    assert {path.name for path in tmp_path.iterdir()} == {"log", "python"}
