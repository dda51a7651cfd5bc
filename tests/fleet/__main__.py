"""`python -m tests.fleet [SCENARIO]`: a fleet, by default `fleet.toml`. Exit status 1 if an
expectation does not hold."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from kvactors.scenario.output import live_line
from kvactors.scenario.report import totals_line
from kvactors.scenario.spec import outcomes, requests_of
from kvactors.settings import read_toml
from kvactors.signals import run_terminable
from tests.fleet.run import FLEET, run_fleet
from tests.fleet.spec import FleetScenario, print_fleet


def main() -> int:
    """Run, print, return the exit status."""
    data = read_toml(Path(sys.argv[1]) if len(sys.argv) > 1 else FLEET)
    scenario = FleetScenario.from_mapping(data)
    with live_line(requests_of(data)) as show:
        work = run_fleet(data, scenario.scenario.seed, lambda t: show(totals_line(t), t.requests))
        report = run_terminable(work)
    report.description = scenario.scenario.description
    report.expectations = outcomes(scenario.expect, report)
    print_fleet(report, Console())
    failed = report.failures()
    for what in failed:
        print(f"not as expected: {what}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
