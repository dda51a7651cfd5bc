"""Benchmark inside vLLM on a CPU: kvactors' tiers beside vLLM's own and beside none, in one run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvactors.bench.report import Row, bench_report, rate_row, time_row
from kvactors.errors import ConfigError

KINDS = ("none", "vllm", "ours")
LIMIT = 900.0
"""Seconds that one engine may take, its start included. Only a hang takes as long."""

HOW = (
    "`python -m tests.interop.setup DIR engines` in a clone makes an environment, then run "
    "`kvactors bench engine --vllm-python DIR/vllm_cpu/bin/python`"
)

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}

PEER = "vLLM's host tier and its fs tier, same run"
NONE = "vLLM without tiers, which computes the prompt, same run"


def measured(python: str, kind: str, rounds: int) -> dict[str, Any]:
    """The figures of one engine.

    Raises:
        ConfigError: the Python has no vLLM or no kvactors, or the engine fails.
    """
    script = str(Path(__file__).with_name("engine_child.py"))
    with tempfile.TemporaryFile() as log:
        try:
            done = subprocess.run(  # noqa: S603, the caller names the Python
                [python, "-P", script, kind, str(rounds)],
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=LIMIT,
                check=False,
                env=os.environ | VARIABLES,
            )
        except OSError as error:
            raise ConfigError(f"{python} does not start: {error}. {HOW}") from error
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"vLLM with {kind} was not done in {LIMIT:g} s") from error
        log.seek(0)
        end = log.read().decode(errors="replace")[-2000:]
    if done.returncode:
        hint = f". {HOW}" if "ModuleNotFoundError" in end else ""
        raise ConfigError(f"{python} cannot run vLLM with {kind}{hint}:\n{end}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rows_of(found: dict[str, dict[str, Any]]) -> list[Row]:
    """The rows of a report, of the figures of every kind."""
    none, vllm, ours = (found[kind] for kind in KINDS)
    rows = [
        time_row("look-up, per call", ours["lookup_us"], vllm["lookup_us"], "us", PEER),
        time_row("load, submitted to done", ours["load_ms"], vllm["load_ms"], "ms", PEER),
        time_row("store, submitted to done", ours["store_ms"], vllm["store_ms"], "ms", PEER),
    ]
    for place in ("host", "storage"):
        case = f"first token of a prompt from {place}"
        mine, theirs, computed = (one["first_token_ms"][place] for one in (ours, vllm, none))
        rows += [
            time_row(case, mine, theirs, "ms", PEER),
            time_row(f"{case}, without tiers", mine, computed, "ms", NONE),
        ]
    case = "steps with transfers in flight"
    mine, theirs, computed = (one["steps_per_second"] for one in (ours, vllm, none))
    return [
        *rows,
        rate_row(case, mine, theirs, "steps/s", PEER),
        rate_row(f"{case}, without tiers", mine, computed, "steps/s", NONE),
    ]


def run(*, quick: bool = False, vllm_python: str = "") -> dict[str, Any]:
    """All rows.

    Args:
        quick: few prompts.
        vllm_python: a Python that has vLLM and kvactors. By default this one, if it has vLLM.

    Raises:
        ConfigError: there is no such Python, or vLLM fails in it.
    """
    if not vllm_python:
        if find_spec("vllm") is None:
            raise ConfigError(f"bench engine needs a Python that has vLLM and kvactors: {HOW}")
        vllm_python = sys.executable
    rounds = 2 if quick else 16
    found = {kind: measured(vllm_python, kind, rounds) for kind in KINDS}
    settings = {"rounds": rounds, "quick": quick, "vllm": vllm_python}
    settings |= {f"cached tokens, {kind}": found[kind]["cached"] for kind in KINDS}
    settings["look-ups"] = {kind: found[kind]["lookups"] for kind in KINDS[1:]}
    return bench_report("engine", rows_of(found), settings)
