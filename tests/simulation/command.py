"""Output and exit status of `python -m tests.simulation`."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

import msgspec
from rich.console import Console

from kvactors.scenario.output import live_line, print_details, print_fields, write_json
from tests.simulation.coverage import Coverage, coverage
from tests.simulation.pool import run_seeds
from tests.simulation.record import SeedReport

SHOWN = 10
"""Violated seeds that are printed."""

NAMED = 12
"""Things never reached that are printed of a group. The JSON report has all of them."""

ENDLESS = 1 << 40
"""Seeds of a run that only its minutes end."""

TRACE = 100_000
"""Lines of the trace of a seed run alone."""


class SimulationReport(msgspec.Struct):
    """Many seeds together. never: by group, what was not reached. violated: the reports of seeds in
    which something was violated."""

    first: int
    seeds: int = 0
    wall_s: float = 0.0
    virtual_s: float = 0.0
    requests: int = 0
    answered: int = 0
    verified: int = 0
    wrong: int = 0
    faults: int = 0
    turns: int = 0
    slowest_s: float = 0.0
    violated: list[SeedReport] = []
    there: dict[str, int] = {}
    never: dict[str, list[str]] = {}
    seen: dict[str, int] = {}

    def add(self, one: SeedReport) -> None:
        """One seed more."""
        self.seeds += 1
        for name in ("virtual_s", "requests", "answered", "verified", "wrong", "faults", "turns"):
            setattr(self, name, getattr(self, name) + getattr(one, name))
        self.slowest_s = max(self.slowest_s, one.wall_s)
        if one.violations:
            self.violated.append(one)

    def cover(self, found: Coverage, seen: Counter[str]) -> None:
        """Set the coverage of all seeds together."""
        self.there, self.never, self.seen = found.there, found.never, dict(sorted(seen.items()))


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
    configuration and its trace. direct: share of the asks that may be inline turns. sharing: with forks, sleeps, quotas, hints,
    pins and clears of one salt."""
    if seed is not None:
        return _run_one(seed, json, direct, sharing)
    began = time.monotonic()
    until = float("inf") if minutes is None else began + 60 * minutes
    report, seen = SimulationReport(first), Counter[str]()
    with live_line() as show:
        for one in run_seeds(
            first,
            seeds if minutes is None else ENDLESS,
            processes,
            until=until,
            direct=direct,
            sharing=sharing,
        ):
            report.add(one)
            seen.update(one.seen)
            report.wall_s = time.monotonic() - began
            show(_progress(report))
    report.cover(coverage([seen]), seen)
    _print_summary(report, Console(), began)
    if json is not None:
        write_json(report, json)
    for one in report.violated[:SHOWN]:
        _print_violations(one)
    return 1 if report.violated else 0


def _run_one(seed: int, json: Path | None, direct: float, sharing: bool) -> int:
    (report,) = run_seeds(seed, 1, 1, keep=TRACE, direct=direct, sharing=sharing)
    print(f"seed {seed}\nconfig {report.config}\nplan {report.plan}")
    for line in report.tail:
        print(line)
    print(
        f"{report.requests} requests, {report.verified} blocks verified, {report.turns} turns, "
        f"trace {report.trace}"
    )
    if json is not None:
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


def _print_summary(report: SimulationReport, console: Console, began: float) -> None:
    wall = time.monotonic() - began
    rows = {
        "seeds a second": f"{report.seeds / max(wall, 1e-9):.1f}",
        "slowest seed": f"{report.slowest_s:.2f} s",
        "virtual time": f"{report.virtual_s / 3600:.2f} h",
        "requests": f"{report.requests:,} ({report.answered:,} to their end)",
        "faults": f"{report.faults:,}",
        "turns of actors": f"{report.turns:,}",
        "blocks verified": f"{report.verified:,}",
        "wrong bytes": f"{report.wrong:,}",
        "seeds violated": f"{len(report.violated):,}",
    }
    rows |= {
        f"reached: {group}": f"{count - len(report.never[group])} of {count}"
        for group, count in report.there.items()
    }
    last = report.first + report.seeds - 1
    title = f"simulation, seeds {report.first} .. {last}, {wall:.0f} s"
    print_fields(title, rows.items(), console)
    for group, never in report.never.items():
        if never:
            more = f"; and {len(never) - NAMED} more" if len(never) > NAMED else ""
            text = f"never reached, {group}: {'; '.join(never[:NAMED])}{more}"
            print_details(text, console)


def _progress(report: SimulationReport) -> str:
    rate = report.seeds / max(report.wall_s, 1e-9)
    return (
        f"{report.seeds} seeds, {rate:.1f} a second, {report.verified:,} blocks verified, "
        f"{len(report.violated)} violated"
    )
