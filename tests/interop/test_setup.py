"""Tests with other programs: failures without the environments, and no part of other runs."""

from __future__ import annotations

import subprocess
import sys

import pytest

PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
CASES = [
    ("interop", "tests/interop/test_router.py", "joined"),
    ("engines", "tests/interop/engines/test_offloading.py", "greedy"),
]


@pytest.mark.parametrize(("marker", "file", "case"), CASES)
def test_without_environments_a_test_fails_and_is_not_skipped(
    marker: str, file: str, case: str
) -> None:
    command = [*PYTEST, "-m", marker, file, "-k", case]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "1 failed" in done.stdout
    assert "--interop=DIR" in done.stdout


def test_tests_with_other_programs_are_left_out_unless_they_are_asked_for() -> None:
    files = [file for _, file, _ in CASES]
    done = subprocess.run(
        [*PYTEST, "--collect-only", *files], capture_output=True, text=True, check=False
    )
    assert "deselected" in done.stdout
    assert "0 selected" in done.stdout or "no tests" in done.stdout
