"""A short soak and a few seeds of the oracle engine: the tools run, and find nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.memory import Memory, grown, measure

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_a_short_soak_finds_nothing(tmp_path):
    out = tmp_path / "soak.json"
    command = [
        sys.executable,
        "-m",
        "tests.soak",
        "--requests",
        "1200",
        "--seed",
        "7",
        "--json",
        str(out),
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    report = json.loads(out.read_text("utf-8"))
    assert run.returncode == 0, run.stderr
    assert report["failures"] == report["wrong_bytes"] == report["actor_restarts"] == 0
    assert report["requests"] > 1100
    assert report["verified_blocks"] > 1200
    assert len(report["memory_kib"]) == 4
    assert min(report["held_kib"]) > 1000
    assert min(report["python_blocks"]) > 10_000


def flat(field: str = "held_kib", each: int = 0, rounds: int = 125) -> list[Memory]:
    """Rounds of a process in which one figure rises by `each` a round."""
    start = Memory(10_000, 200_000, 50_000, 4, 20)
    return [
        start._replace(**{field: getattr(start, field) + each * number}) for number in range(rounds)
    ]


def test_a_leak_of_sixteen_bytes_a_request_is_found_in_a_hundred_thousand_requests():
    """Two processes of 125 rounds of 400 requests each."""
    assert grown(flat()) == ""
    assert grown(flat(each=6)) == ""
    assert grown(flat(each=13)).startswith("held_kib from 10403 to ")
    assert grown(flat("blocks", 60)).startswith("blocks from ")
    assert grown(flat("threads", 1)).startswith("threads from ")
    assert grown(flat("descriptors", 1)).startswith("descriptors from ")
    assert grown(flat("resident_kib", 40, rounds=1250)).startswith("resident_kib from ")


def test_memory_that_is_held_is_measured():
    before = measure()
    kept = [bytes(100_000) for _ in range(50)], [[number] for number in range(10_000)]
    after = measure()
    assert after.held_kib - before.held_kib > 4_000
    assert after.blocks - before.blocks > 9_000
    del kept
    freed = measure()
    assert freed.held_kib - before.held_kib < 2_000
    assert freed.blocks - before.blocks < 2_000


CHURN = """
import sys
import tests.soak.rounds
from tests.soak.memory import grow_intern_table, held_kib

grow_intern_table()
before = peak = held_kib()
for number in range(200_000):
    sys.intern(f"dropped {number}")
    if number % 1_000 == 0:
        peak = max(peak, held_kib())
print(peak - before)
"""


def test_the_intern_table_has_its_size_before_the_first_measure():
    """In a separate process, because the table of this one may have grown already. Without
    `grow_intern_table` it grows by 940 KiB."""
    command = [sys.executable, "-c", CHURN]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 400


@pytest.mark.timeout(600)
def test_seeds_of_the_oracle_find_nothing():
    command = [
        sys.executable,
        "-m",
        "tests.oracle",
        "--seeds",
        "12",
        "--first",
        "1000",
        "--requests",
        "80",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert " 0 wrong, 0 actor restarts, 0 failures" in run.stdout
    assert "killed: " in run.stdout
