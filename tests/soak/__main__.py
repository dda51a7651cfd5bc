"""`python -m tests.soak --requests N`: seeds of the oracle in several processes, whose memory must
not grow, and processes killed with SIGKILL. Exit status 1 on any failure."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from kvactors.scenario.output import print_details, print_fields, write_json
from tests.oracle.record import SHARING, Record
from tests.soak.memory import Memory, grown, growth
from tests.soak.rounds import ROUND, rounds


def soak(seed: int, requests: int, size: int, minutes: float, processes: int) -> dict[str, Any]:
    """Run the rounds in several processes. Returns their results."""
    began = time.monotonic()
    total, memory = Record(), list[list[Memory]]()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        shares = [requests // processes + (i < requests % processes) for i in range(processes)]
        running = [
            pool.submit(rounds, seed * 1000 + i, share, size, began + 60 * minutes)
            for i, share in enumerate(shares)
            if share
        ]
        for number, one in enumerate(running):
            try:
                record, points = one.result()
            except Exception as error:  # the process has ended, or its rounds broke
                total.fail(f"process {number}: {error!r}")
                continue
            total.add(record)
            memory.append(points)
            if what := grown(points):
                total.fail(
                    f"memory of process {number} grew between a quarter and the end of its "
                    f"rounds: {what}"
                )
    ends = [growth(points) for points in memory]
    wall = time.monotonic() - began
    return {
        "requests": total.requests,
        "requests_per_s": round(total.requests / wall, 1),
        "wall_s": round(wall, 1),
        "finished": total.finished,
        "verified_blocks": total.verified,
        "wrong_bytes": total.wrong,
        "actor_restarts": total.restarts,
        "failures": total.failed,
        "rounds": sum(map(len, memory)),
        **{
            f"{name} from a quarter to the end": [
                sum(getattr(end[i], name) for end in ends) for i in (0, 1)
            ]
            for name in ("held_kib", "blocks", "resident_kib")
        },
        "seen": total.reached(),
        "shown": total.failures,
        "settings": {"seed": seed, "requests": requests, "processes": processes, "round": size},
    }


def main() -> int:
    """Run, print and write. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--round", type=int, default=ROUND, help="requests of a round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no round begins later")
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--json", type=Path, help="where to write the report")
    given = parser.parse_args()
    report = soak(given.seed, given.requests, given.round, given.minutes, given.processes)
    rows = {name: str(one) for name, one in report.items() if name not in ("seen", "shown")}
    console = Console()
    print_fields("soak", rows.items(), console)
    if never := [what for what in SHARING if not report["seen"].get(what)]:
        print_details(f"never reached: {', '.join(never)}", console)
    seen = ", ".join(f"{what} {count:,}" for what, count in report["seen"].items())
    print_details(f"reached: {seen}", console)
    for what in report["shown"]:
        print(f"FAILED {what}", file=sys.stderr)
    write_json(report, given.json)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
