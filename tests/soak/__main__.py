"""`python -m tests.soak --requests N`: a soak. Exit status 1 on any failure."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from kvactors.scenario.output import print_details, print_fields, write_json
from tests.oracle.record import SHARING, Record
from tests.soak.memory import Memory, grown, growth
from tests.soak.rounds import work

SILENT = 900.0
"""Seconds without a report from a process after which it counts as hung."""


def main() -> int:
    """Run, print and write. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--minutes", type=float, help="stop after so many minutes even if requests are left"
    )
    cores = min(4, os.cpu_count() or 1)
    parser.add_argument(
        "--jobs",
        "--processes",
        dest="processes",
        type=int,
        default=cores,
        help="processes (default: the cores, at most 4)",
    )
    parser.add_argument("--json", help="write the report to this file, - for standard output")
    parser.add_argument("--no-hostile", action="store_true", help="no bad arguments")
    options = parser.parse_args()
    if options.json not in (None, "-"):
        Path(options.json).touch()
    report = soak(
        options.seed,
        options.requests,
        options.minutes,
        options.processes,
        hostile=not options.no_hostile,
    )
    show(report)
    if options.json:
        write_json(report, options.json)
    return 1 if report["failures"] or report["shown"] else 0


def soak(
    seed: int, requests: int, minutes: float | None, processes: int, *, hostile: bool
) -> dict[str, Any]:
    """Run the rounds in several processes. Returns their results."""
    began = time.monotonic()
    until = float("inf") if minutes is None else began + 60 * minutes
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    shares = [requests // processes + (i < requests % processes) for i in range(processes)]
    arguments = [
        (seed * 1000 + i, share, until, results, hostile, i)
        for i, share in enumerate(shares)
        if share
    ]
    workers = [context.Process(target=work, args=one) for one in arguments]
    for worker in workers:
        worker.start()
    memory: dict[int, list[Memory]] = {i: [] for *_, i in arguments}
    total, heard = Record(), time.monotonic()
    running = set(memory)
    while running:
        try:
            number, record, measured = results.get(timeout=1.0)
        except queue.Empty:
            for i in [i for i in running if workers[i].exitcode not in (None, 0)]:
                total.fail(f"process {i} ended with exit status {workers[i].exitcode}")
                running.discard(i)
            if time.monotonic() - heard > SILENT:
                total.fail(f"processes {sorted(running)} do not end")
                break
            continue
        heard = time.monotonic()
        if record is None:
            running.discard(number)
            continue
        total.add(record)
        memory[number].append(measured)
    for worker in workers:
        worker.join(5.0)
        if worker.is_alive():
            worker.kill()
    for number, one in memory.items():
        if one and (what := grown(one)):
            total.fail(
                f"memory of process {number} grew between a quarter and the end of its rounds: "
                f"{what}"
            )
    points = [quarters(one) for one in memory.values() if one]
    ends = [growth(one) for one in memory.values() if one]
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
        "rounds": sum(map(len, memory.values())),
        "memory_kib": [sum(column) for column in zip(*points, strict=True)] if points else [],
        "held_kib": [sum(pair[i].held_kib for pair in ends) for i in range(2)],
        "python_blocks": [sum(pair[i].blocks for pair in ends) for i in range(2)],
        "seen": total.reached(),
        "shown": total.failures,
        "settings": {
            "seed": seed,
            "requests": requests,
            "processes": processes,
            "hostile": hostile,
        },
    }


def quarters(memory: list[Memory]) -> tuple[int, int, int, int]:
    """Resident KiB after the first round, a quarter, a half, all of them. Each is the median of the
    rounds around it."""

    def around(at: int) -> int:
        near = sorted(one.resident_kib for one in memory[max(0, at - 4) : at + 5])
        return near[len(near) // 2]

    last = len(memory) - 1
    return memory[0].resident_kib, around(last // 4), around(last // 2), around(last)


def show(report: dict[str, Any]) -> None:
    """The table."""
    start, quarter, half, end = report["memory_kib"] or [0, 0, 0, 0]
    rows = {
        "requests": f"{report['requests']:,} ({report['finished']:,} finished) in "
        f"{report['rounds']} rounds",
        "requests a second": f"{report['requests_per_s']:,}",
        "wall, s": f"{report['wall_s']}",
        "verified blocks": f"{report['verified_blocks']:,}",
        "wrong bytes": f"{report['wrong_bytes']}",
        "actor restarts": f"{report['actor_restarts']}",
        "held from a quarter to the end": "{:,} to {:,} KiB, ".format(*report["held_kib"])
        + "{:,} to {:,} blocks of Python".format(*report["python_blocks"]),
        "resident, MiB": f"start {start >> 10}  quarter {quarter >> 10}  half {half >> 10}  end "
        f"{end >> 10}",
        "failures": f"{report['failures']}",
    }
    console = Console()
    print_fields(f"soak, seed {report['settings']['seed']}", rows.items(), console)
    if never := [what for what in SHARING if not report["seen"].get(what)]:
        print_details(f"never reached: {', '.join(never)}", console)
    seen = ", ".join(f"{what} {count:,}" for what, count in report["seen"].items())
    print_details(f"reached: {seen}", console)
    for what in report["shown"]:
        print(f"FAILED {what}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
