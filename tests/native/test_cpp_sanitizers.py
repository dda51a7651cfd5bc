"""Builds the C++ tests under AddressSanitizer and UBSan, and runs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

NATIVE = Path(__file__).parents[2] / "native"


def cmake() -> str:
    """The one of this environment, else the system's."""
    own = Path(sys.executable).parent / "cmake"
    return str(own) if own.exists() else "cmake"


@pytest.mark.timeout(600)
def test_cpp_tests_pass_under_sanitizers(tmp_path):
    configure = [
        cmake(),
        "-S",
        NATIVE,
        "-B",
        tmp_path,
        "-DKVACTORS_TESTS=ON",
        "-DKVACTORS_PYTHON=OFF",
        "-DCMAKE_BUILD_TYPE=None",
    ]
    for command in (configure, [cmake(), "--build", tmp_path, "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout + done.stderr
    tests = sorted(tmp_path.glob("test_*"))
    tests = [test for test in tests if test.is_file() and test.suffix == ""]
    assert {test.name for test in tests} >= {"test_copy", "test_copy_queue", "test_tree"}
    for test in tests:
        done = subprocess.run([test], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
