"""vLLM's tests of a file tier over kvactors' tier, and units of the adapter in vLLM's environment."""

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

pytestmark = pytest.mark.engines

HERE = Path(__file__).parent
LIMIT = 1400
"""Seconds that the inner pytest may take. Only a hang takes as long."""
FS_TIER = "tests/v1/kv_offload/tiering/test_fs_tier.py"

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


def test_units_and_vllms_tests_of_its_file_tier_over_ours(
    environments: Environments, tmp_path: Path
) -> None:
    """One pytest in vLLM's environment: the import of vLLM takes longer than the tests."""
    source = environments.source(ENVIRONMENT, "vllm==0.32.0")
    definitions = ast.parse((source / FS_TIER).read_text()).body
    functions = [node.name for node in definitions if isinstance(node, ast.FunctionDef)]
    tests = {name for name in functions if name.startswith("test_")}
    assert tests > ABOUT_VLLMS_FILES.keys()
    chosen = [f"{FS_TIER}::{name}" for name in sorted(tests - ABOUT_VLLMS_FILES.keys())]
    (tmp_path / "tests").symlink_to(source / "tests")
    shutil.copy(HERE / "fs_tier_plugin.py", tmp_path)
    shutil.copy(HERE / "units_inner.py", tmp_path / "test_units.py")
    model = str(write_model(tmp_path / "model"))
    variables = {"PYTHONPATH": str(tmp_path), "ENGINE_TEST_MODEL": model}
    options = ["-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", "-c", os.devnull]
    options += ["-p", "fs_tier_plugin"]
    command = [environments.program(ENVIRONMENT), "-m", "pytest", *options]
    done = subprocess.run(
        [*command, "test_units.py", *chosen],
        cwd=tmp_path,
        env=os.environ | VARIABLES | variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    last = done.stdout.strip().splitlines()[-1]
    passed = re.match(r"(\d+) passed", last)
    assert passed, last
    assert "skipped" not in last
    assert int(passed[1]) >= 23
