"""The same seed is the same run: the same trace, the same report."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import run_seed
from tests.simulation.command import run_simulate

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(12))
def test_the_same_seed_twice(seed):
    one, two = run_seed(seed), run_seed(seed)
    assert one.trace
    assert one.tail == two.tail
    assert one.same_run(two)


def test_other_seeds_are_other_runs():
    assert len({run_seed(seed).trace for seed in range(6)}) == 6


def test_another_process_replays_it(capfd):
    run_simulate(seed=5)
    first = capfd.readouterr().out
    command = [sys.executable, "-m", "tests.simulation", "--seed", "5"]
    again = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert again.stdout == first
    assert " takes " in first
    assert "trace " in first


def test_a_violation_is_a_bad_exit_and_prints_how_to_repeat_it(capfd, monkeypatch):
    from tests.simulation import command
    from tests.simulation.record import SeedReport

    monkeypatch.setattr(
        command,
        "run_seeds",
        lambda first, *_args, **_options: iter([SeedReport(first, ["a block was lost"])]),
    )
    assert run_simulate(seeds=1, first=7) == 1
    said = capfd.readouterr().err
    assert "violated: seed 7: a block was lost" in said
    assert "python -m tests.simulation --seed 7" in said


def test_many_seeds_are_summed_up(capfd, tmp_path):
    report = tmp_path / "report.json"
    run_simulate(seeds=4, first=1, processes=2, json=report)
    assert "virtual_s" in capfd.readouterr().out
    assert '"seeds": 4' in report.read_text()
