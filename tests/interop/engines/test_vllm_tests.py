"""vLLM's own tests with kvactors installed, and its test harness over kvactors' classes."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.interop.engines.tiny_llama import write_model
from tests.interop.engines.vllm_engine import ENVIRONMENT, VARIABLES
from tests.interop.environments import Environments
from tests.interop.network import raise_loopback

pytestmark = pytest.mark.engines

HERE = Path(__file__).parent
PLUGINS = ("vllm_tests_plugin", "fs_tier_plugin")
LIMIT = 2900
"""Seconds that the inner pytest may take. Only a hang takes as long."""
CONNECTOR = "tests/v1/kv_connector/unit/offloading_connector"
OFFLOADING = "tests/v1/kv_offload"
FS_TIER = f"{OFFLOADING}/tiering/test_fs_tier.py"

QUICK = (
    f"{CONNECTOR}/test_config.py",
    f"{CONNECTOR}/test_events.py",
    f"{CONNECTOR}/test_metrics.py",
    f"{CONNECTOR}/test_worker.py",
    f"{OFFLOADING}/cpu/test_manager.py",
    f"{OFFLOADING}/test_factory.py",
    f"{OFFLOADING}/tiering/test_factory.py",
    f"{OFFLOADING}/tiering/test_tiering_offloading.py",
)
"""Files of vLLM's tests that take seconds and do not depend on the load of the machine
(`test_shared_offload_region.py` gives new processes 30 s to import vLLM)."""

NEEDS_MORE = {
    f"{OFFLOADING}/cpu/test_gpu_worker.py": "a GPU",
    f"{OFFLOADING}/cpu/test_swap_blocks_batch.py": "a GPU",
    f"{OFFLOADING}/cpu/test_swap_blocks_triton.py": "a GPU",
    f"{OFFLOADING}/tiering/p2p": "NIXL",
}
"""Tests of vLLM that do not run on a CPU, and what they need."""

ABOUT_VLLMS_FILES = {
    "test_shutdown_discards_pending_tasks": "looks into vLLM's thread pool",
    "test_store_load_roundtrip_without_o_direct": "patches vLLM's probe of the file system",
    "test_wait_idle_blocks_until_tasks_complete": "is about vLLM's thread pool",
    "test_batch_lookup_c_extension": "is about vLLM's C extension",
    "test_failed_load_corrects_verdict_and_removes_corrupt_file": "overwrites a chunk's file",
    "test_batched_partial_load_failure_keeps_loaded_blocks": "overwrites a chunk's file",
    "test_batched_load_first_block_fails_marks_whole_batch": "overwrites a chunk's file",
    "test_transient_load_failure_leaves_file": "replaces a chunk's file",
    "test_mixed_job_results_emit_event_only_for_successful_job": "patches vLLM's writes",
    "test_partially_failed_store_emits_no_event": "patches vLLM's writes",
    "test_events_disabled_by_default": "looks into vLLM's tier",
    "test_events_require_global_kv_events_flag": "looks into vLLM's tier",
    "test_fs_tier_cross_tp_round_trip": "shares a store between parallel sizes",
}
"""Tests of vLLM's file tier that are not about a tier's behaviour, and why. The damage that some of
them do is done by `test_offloading.py` and `units_inner.py` in the same place."""


def run_inside(environments: Environments, folder: Path, *arguments: str) -> str:
    """Run pytest in vLLM's environment, in a folder with vLLM's `tests`. Returns its last line."""
    raise_loopback()
    source = environments.source(ENVIRONMENT, "vllm==0.32.0")
    (folder / "tests").symlink_to(source / "tests")
    plugins = folder / "plugins"
    plugins.mkdir()
    for plugin in PLUGINS:
        shutil.copy(HERE / f"{plugin}.py", plugins)
    for name in ("runner", "units"):
        shutil.copy(HERE / f"{name}_inner.py", folder / f"test_{name}.py")
    variables = {
        "PYTHONPATH": f"{folder}:{plugins}",
        "ENGINE_TEST_MODEL": str(write_model(folder / "model")),
    }
    python = environments.program(ENVIRONMENT)
    plain = ["-q", "-p", "no:cacheprovider", "-p", "vllm_tests_plugin", f"--rootdir={folder}"]
    done = subprocess.run(
        [python, "-m", "pytest", "-c", os.devnull, *plain, *arguments],
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
    assert int(last.split()[0]) > 12


def passed(last: str) -> int:
    """The number of tests that passed, from the last line of pytest. None may have failed."""
    assert "failed" not in last, last
    assert "error" not in last, last
    found = re.search(r"(\d+) passed", last)
    return int(found[1]) if found else 0


def test_vllms_quick_tests_of_offloading(environments: Environments, tmp_path: Path) -> None:
    last = run_inside(environments, tmp_path, *QUICK)
    print(last)
    assert passed(last) > 300


@pytest.mark.engines_full
def test_all_tests_of_vllm_of_offloading(environments: Environments, tmp_path: Path) -> None:
    left_out = [f"--ignore={path}" for path in NEEDS_MORE]
    last = run_inside(environments, tmp_path, CONNECTOR, OFFLOADING, *left_out)
    print(last)
    assert passed(last) > 900


def test_the_tier_passes_vllms_tests_of_the_file_tier(
    environments: Environments, tmp_path: Path
) -> None:
    text = (environments.source(ENVIRONMENT, "vllm==0.32.0") / FS_TIER).read_text()
    tests = {
        node.name
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert tests > ABOUT_VLLMS_FILES.keys()
    chosen = [f"{FS_TIER}::{name}" for name in sorted(tests - ABOUT_VLLMS_FILES.keys())]
    last = run_inside(environments, tmp_path, "-p", "fs_tier_plugin", *chosen)
    print(last)
    assert "skipped" not in last
    assert passed(last) >= 25
