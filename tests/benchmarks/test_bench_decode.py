"""The benchmark of decode steps: the rows beside peers that a stand-in plays, and its errors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.benchmarks import decode

STAND_IN = """#!{python}
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    print(json.dumps({{"seconds": message["requests"] * {steps} * 2e-6}}), flush=True)
"""
"""A program in the place of a Python that has a peer: two microseconds a request and step."""


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "SIZES", ((8, 16),))
    monkeypatch.setattr(decode, "BARS_US", {8: 1.0})


def test_a_step_is_beside_the_bar_and_each_peer(tmp_path: Path, few: None) -> None:
    python = tmp_path / "python"
    python.write_text(STAND_IN.format(python=sys.executable, steps=decode.STEPS))
    python.chmod(0o755)
    alone = decode.run(quick=True)["rows"]
    assert [row["limit_name"] for row in alone] == ["the bar"]
    rows = decode.run(quick=True, vllm_python=str(python), sglang_python=str(python))["rows"]
    assert [(row["case"], row["limit"], row["limit_name"]) for row in rows] == [
        ("8 requests, block 16, step", 1.0, "the bar"),
        ("8 requests, block 16, step", 2.0, decode.PEERS["vllm"]),
        ("8 requests, block 16, step", 2.0, decode.PEERS["sglang"]),
        ("8 requests, block 16, extend and commit one by one", 2.0, decode.PEERS["vllm"]),
    ]
    assert all(row["ours"] > 0 for row in rows)
