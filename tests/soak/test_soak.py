"""A short soak: seeds of the oracle, killed processes, and memory that does not grow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.memory import Memory, grown, measure

ROOT = Path(__file__).parents[2]


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_a_short_soak_finds_nothing(tmp_path):
    out = tmp_path / "soak.json"
    options = ("--requests", "1440", "--round", "80", "--seed", "7", "--processes", "2")
    command = [sys.executable, "-m", "tests.soak", *options, "--json", str(out)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    report = json.loads(out.read_text("utf-8"))
    assert report["failures"] == report["wrong_bytes"] == report["actor_restarts"] == 0
    assert report["requests"] > 1400
    assert report["verified_blocks"] > 1200
    assert report["seen"]["killed"] > 0
    assert report["seen"]["states verified of hits"] > 0
    assert report["seen"]["blocks of windows verified of hits"] > 0
    assert min(report["held_kib from a quarter to the end"]) > 1000
    assert min(report["blocks from a quarter to the end"]) > 10_000


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
