"""A short soak and a few seeds of the oracle engine: the tools run, and find nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_a_short_soak_finds_nothing(tmp_path):
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "tests.soak", "--requests", "2000", "--seed", "7", "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(out.read_text("utf-8"))
    assert run.returncode == 0, run.stderr
    assert report["failures"] == report["wrong_bytes"] == report["actor_restarts"] == 0
    assert report["requests"] > 1900
    assert report["verified_blocks"] > 2000
    assert len(report["memory_kib"]) == 4


@pytest.mark.timeout(600)
def test_seeds_of_the_oracle_find_nothing():
    command = [sys.executable, "-m", "tests.oracle", "--seeds", "24", "--first", "1000", "--requests", "80"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert " 0 wrong, 0 actor restarts, 0 failures" in run.stdout
    assert "killed: " in run.stdout


@pytest.mark.parametrize(
    ("tool", "options"), [("soak", ["--requests", "0"]), ("soak", ["--jobs", "0"]), ("oracle", ["--seeds", "-1"])]
)
def test_counts_that_cannot_be_are_refused(tool, options):
    run = subprocess.run(
        [sys.executable, "-m", f"tests.{tool}", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "must be" in run.stderr
