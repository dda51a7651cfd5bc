"""`python -m tests.fleet [SCENARIO] [--html FILE]`: a fleet, by default `fleet.toml`. Exit status 1 if
an expectation does not hold."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import run
from rich.console import Console

from kvactors.scenario.output import Output, live_line, write_output
from kvactors.scenario.pages import check_charts
from kvactors.scenario.report import print_proof, totals_line
from kvactors.scenario.spec import outcomes, requests_of
from kvactors.settings import read_toml
from kvactors.signals import run_terminable
from tests.fleet.run import FLEET, run_fleet
from tests.fleet.spec import FleetScenario, fleet_page, print_fleet


def fleet(scenario: Path = FLEET, /, *, html: Output | None = None) -> int:
    """Run, print, write a page. Returns the exit status."""
    if html is not None:
        check_charts()
    data = read_toml(scenario)
    spec = FleetScenario.from_mapping(data)
    with live_line(requests_of(data)) as show:
        work = run_fleet(data, spec.scenario.seed, lambda t: show(totals_line(t), t.requests))
        report = run_terminable(work)
    report.description = spec.scenario.description
    report.expectations = outcomes(spec.expect, report)
    print_fleet(report, Console(), report.name)
    print_proof(report, Console())
    if html is not None:
        write_output(fleet_page(report, data).encode(), html)
    failed = report.failures()
    for what in failed:
        print(f"not as expected: {what}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(fleet, result_action="return_value"))
