"""Output and exit status of `python -m tests.simulation`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from kvactors.scenario.output import live_line, print_fields, write_json
from tests.simulation.coverage import coverage
from tests.simulation.pool import run_seeds
from tests.simulation.record import SeedReport

SHOWN = 10
"""Violated seeds that are printed."""

ENDLESS = 1 << 40
"""Seeds of a run that only its minutes end."""

TRACE = 100_000
"""Lines of the trace of a seed run alone."""

SUMS = ("virtual_s", "requests", "answered", "verified", "wrong", "faults", "turns")


def run_simulate(
    seeds: int = 200,
    first: int = 0,
    minutes: float | None = None,
    json: Path | None = None,
    processes: int = 2,
    seed: int | None = None,
    direct: float = 0.0,
    sharing: bool = True,
) -> int:
    """Run, print and write. Returns the exit status, 0 only if nothing was violated. minutes: as
    many seeds as they allow, in place of `seeds`. seed: only this one, with its plan, its
    configuration and its trace. direct: share of the asks that may be inline turns. sharing: with
    forks, sleeps, quotas, hints, pins and clears of one salt."""
    how: Any = {"direct": direct, "sharing": sharing}
    if seed is not None:
        return _run_one(seed, json, how)
    began = time.monotonic()
    until = float("inf") if minutes is None else began + 60 * minutes
    sums, seen = Counter[str](), Counter[str]()
    violated: list[SeedReport] = []
    with live_line() as show:
        count = seeds if minutes is None else ENDLESS
        for one in run_seeds(first, count, processes, until=until, **how):
            sums.update({"seeds": 1, **{name: getattr(one, name) for name in SUMS}})
            seen.update(one.seen)
            if one.violations:
                violated.append(one)
            show(f"{sums['seeds']} seeds, {len(violated)} violated")
    never = coverage([seen]).never
    figures = {
        **{name: round(value, 3) for name, value in sums.items()},
        "violated": len(violated),
        "seconds": round(time.monotonic() - began, 1),
    }
    rows = {name: f"{value:,}" for name, value in figures.items()}
    print_fields("simulation", rows.items(), Console())
    for group, names in never.items():
        if names:
            print(f"never reached, {group}: {'; '.join(names)}")
    write_json({"first": first, **figures, "never": never, "seen": seen}, json)
    for one in violated[:SHOWN]:
        _print_violations(one)
    return 1 if violated else 0


def _run_one(seed: int, json: Path | None, how: Any) -> int:
    (report,) = run_seeds(seed, 1, 1, keep=TRACE, **how)
    print(f"seed {seed}\nconfig {report.config}\nplan {report.plan}")
    for line in report.tail:
        print(line)
    print(
        f"{report.requests} requests, {report.verified} blocks verified, {report.turns} turns, "
        f"trace {report.trace}"
    )
    write_json(report, json)
    _print_violations(report)
    return 1 if report.violations else 0


def _print_violations(report: SeedReport) -> None:
    for what in report.violations:
        print(f"violated: seed {report.seed}: {what}", file=sys.stderr)
    if report.violations:
        print(
            f"repeat: python -m tests.simulation --seed {report.seed}    (trace {report.trace})",
            file=sys.stderr,
        )
