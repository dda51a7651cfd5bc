"""Benchmark inside vLLM on a CPU: kvactors' tiers beside vLLM's own and beside none.

The engines run in separate processes, all in one run, and take turns: a round of each, then
the next round in another order. Each figure is the median of the rounds.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from importlib.util import find_spec
from statistics import median
from typing import Any

from kvactors.errors import ConfigError
from tests.benchmarks.frame import HINT, Peer, Report, Row, rate_row, time_row

KINDS = ("none", "vllm", "ours")
PAUSE = 0.3
"""Seconds between two turns, in which the threads of the engine before fall asleep."""

PLACES = {"new": "new prompt", "host": "prompt from host", "storage": "prompt from storage"}
"""Where the tokens of a prompt come from."""

VLLM = "vLLM's tiers"
NONE = "vLLM without tiers"

Rounds = dict[str, list[dict[str, Any]]]
"""The figures of the rounds of every kind of engine."""


def measured(python: str, rounds: int) -> Rounds:
    """Run the rounds."""
    with ExitStack() as stack:
        engines = {}
        for kind in KINDS:
            engines[kind] = Peer(python, "engine_child.py", kind)
            stack.callback(engines[kind].close)
            engines[kind].ask("prepare")
        found: Rounds = {kind: [] for kind in KINDS}
        for number in range(rounds):
            first = number % len(KINDS)
            for kind in KINDS[first:] + KINDS[:first]:
                time.sleep(PAUSE)
                found[kind].append(engines[kind].ask("round", number=number))
        for engine in engines.values():
            engine.ask("close")
        return found


def rows_of(found: Rounds) -> list[Row]:
    """The rows of a report."""

    def middle(kind: str, place: str, what: str) -> float:
        return float(median(figures[place][what] for figures in found[kind]))

    rows = []
    for place, what in PLACES.items():
        case = f"first token, {what}"
        none, theirs, ours = (1e3 * middle(kind, place, "seconds") for kind in KINDS)
        rows.append(time_row(case, ours, theirs, "ms", VLLM))
        rows.append(time_row(f"{case}, without tiers", ours, none, "ms", NONE))
        _, theirs, ours = (1e3 * middle(kind, place, "processor") for kind in KINDS)
        rows.append(time_row(f"{case}, processor time", ours, theirs, "ms", VLLM))
    case = "steps with transfers in flight"
    none, theirs, ours = (middle(kind, "beside", "steps_per_second") for kind in KINDS)
    rows.append(rate_row(case, ours, theirs, "steps/s", VLLM))
    rows.append(rate_row(f"{case}, without tiers", ours, none, "steps/s", NONE))
    case = "the same requests"
    _, theirs, ours = (middle(kind, "beside", "processor") for kind in KINDS)
    rows.append(time_row(f"{case}, processor time", ours, theirs, "s", VLLM))
    return rows


def run(*, quick: bool = False, vllm_python: str = "") -> Report:
    """All rows. vllm_python: a Python that has vLLM and kvactors, by default this one.

    Raises:
        ConfigError: there is no such Python, or vLLM fails in it.
    """
    if not vllm_python:
        if find_spec("vllm") is None:
            raise ConfigError(
                f"the benchmark engine needs a Python that has vLLM and kvactors: {HINT}, then "
                "give its --vllm-python"
            )
        vllm_python = sys.executable
    rounds = 2 if quick else 12
    found = measured(vllm_python, rounds)
    cached = {
        f"cached tokens of a {what}": found["ours"][-1][place]["cached"]
        for place, what in PLACES.items()
    }
    return Report(rows_of(found), {"rounds": rounds, "quick": quick, **cached})
