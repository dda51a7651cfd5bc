"""Tests that need vLLM and no engine: vLLM's test harness over kvactors' manager, and units."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.interop.engines import vllm_tests_plugin
from tests.interop.engines.tiny_llama import write_model
from tests.interop.engines.vllm_engine import ENVIRONMENT, VARIABLES
from tests.interop.environments import Environments
from tests.interop.network import raise_loopback

pytestmark = pytest.mark.engines

HERE = Path(__file__).parent
LIMIT = 1400
"""Seconds that the inner pytest may take. Only a hang takes as long."""


def run_inside(environments: Environments, folder: Path, *arguments: str) -> str:
    """Run pytest in vLLM's environment, in a folder with vLLM's `tests`. Returns its last line."""
    raise_loopback()
    source = environments.source(ENVIRONMENT, "vllm==0.32.0")
    (folder / "tests").symlink_to(source / "tests")
    plugins = folder / "plugins"
    plugins.mkdir()
    shutil.copy(vllm_tests_plugin.__file__, plugins)
    for name in ("runner", "units"):
        shutil.copy(HERE / f"{name}_inner.py", folder / f"test_{name}.py")
    variables = {
        "PYTHONPATH": f"{folder}:{plugins}",
        "ENGINE_TEST_MODEL": str(write_model(folder / "model")),
    }
    python = environments.program(ENVIRONMENT)
    plain = ["-q", "-p", "no:cacheprovider", "-p", "vllm_tests_plugin", f"--rootdir={folder}"]
    done = subprocess.run(
        [python, "-m", "pytest", "-c", os.devnull, "-x", *plain, *arguments],
        cwd=folder,
        env=os.environ | VARIABLES | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_the_scheduler_of_vllm_over_our_manager(environments: Environments, tmp_path: Path) -> None:
    assert "8 passed" in run_inside(environments, tmp_path, "test_runner.py")


def test_settings_regions_and_tiers(environments: Environments, tmp_path: Path) -> None:
    last = run_inside(environments, tmp_path, "test_units.py")
    assert "failed" not in last
    assert int(last.split()[0]) > 20
