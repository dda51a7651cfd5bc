"""`python -m tests.oracle --seeds N`: rounds of the soak by their seeds, and processes killed with
SIGKILL on the same seeds. Exit status 1 if anything was wrong."""

from __future__ import annotations

import argparse
import sys

import structlog

from tests.oracle.killed import run_killed
from tests.oracle.record import Record
from tests.oracle.run import run_seed
from tests.soak.rounds import KILLED_EVERY


def main() -> int:
    """Run, print, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    total = Record()
    for seed in range(options.first, options.first + options.seeds):
        total.add(run_seed(seed))
        if seed % KILLED_EVERY == KILLED_EVERY - 1:
            total.add(run_killed(seed))
    print(
        f"{options.seeds} seeds: {total.requests} requests, {total.verified} blocks verified, "
        f"{total.wrong} wrong, {total.failed} failures"
    )
    for what in total.failures:
        print(f"FAILED {what}", file=sys.stderr)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
