"""`python -m tests.oracle --seeds N`: seeds of the oracle engine, and of processes killed with
SIGKILL. Exit status 1 if anything was wrong."""

from __future__ import annotations

import argparse
import sys
import time

import structlog

from .killed import run_killed
from .record import Record
from .run import run_seed

KILLED_EVERY = 8
"""One seed in so many is a process that is killed and started again on its store."""


def main() -> int:
    """Run, print, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.oracle", description=__doc__)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--requests", type=int, default=120, help="requests of a seed")
    parser.add_argument(
        "--store",
        choices=("none", "memory", "file", "attention_store"),
        help="this back end in every seed",
    )
    parser.add_argument("--no-hostile", action="store_true", help="no bad arguments")
    parser.add_argument("--no-kill", action="store_true", help="no child processes")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    total, began, failed = Record(), time.monotonic(), []
    for seed in range(options.first, options.first + options.seeds):
        killed = seed % KILLED_EVERY == KILLED_EVERY - 1 and not options.no_kill
        one = (
            run_killed(seed)
            if killed
            else run_seed(
                seed, options.requests, store=options.store, hostile=not options.no_hostile
            )
        )
        if one.failed:
            failed.append(seed)
        total.add(one)
    print(
        f"{options.seeds} seeds, {time.monotonic() - began:.0f} s, {total.requests} requests "
        f"({total.finished} finished)"
    )
    print(
        f"{total.verified} blocks verified, {total.wrong} wrong, {total.restarts} actor restarts, "
        f"{total.failed} failures"
    )
    for what, count in total.reached().items():
        print(f"  {what}: {count}")
    for what in total.failures:
        print(f"FAILED {what}", file=sys.stderr)
    if failed:
        print(f"seeds with failures: {failed}", file=sys.stderr)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
