"""The command `python -m tests.chaos`: its output and exit status."""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from kvactors.scenario.output import live_line, print_rows, write_json
from kvactors.signals import run_terminable
from tests.chaos.record import ChaosReport, Row, Tally
from tests.chaos.run import ROUND, chaos
from tests.chaos.run import Progress as Report
from tests.chaos.situations import situations
from tests.support.console import wide_console

TITLES = (
    "situation",
    "rounds",
    "faults\ninjected",
    "requests",
    "blocks\nverified",
    "wrong",
    "violations",
    "note",
)


def run_chaos(
    minutes: float = 1.0, seed: int | None = None, only: str = "", json: Path | None = None
) -> int:
    """Run, print, write. Returns the exit status, 0 only without violations. seed: from the time if
    None. ConfigError for an unknown name."""
    chosen = situations(only)
    drawn = time.time_ns() // 1_000_000 % 1_000_000 if seed is None else seed
    console = wide_console()
    console.print(f"seed {drawn}", style="dim")
    with watched() as progress:
        report = run_terminable(chaos(chosen, seed=drawn, minutes=minutes, progress=progress))
    print_chaos(report, console)
    if json is not None:
        write_json(report, json)
    for row in report.rows:
        for what in row.tally.errors:
            print(f"violated: {row.name}: {what}", file=sys.stderr)
        for repeat in row.repeat:
            print(f"repeat: {repeat}", file=sys.stderr)
    return 1 if report.violations else 0


@contextmanager
def watched() -> Iterator[Report]:
    """A live line on a terminal, a line a round elsewhere. A loop that stands still for much longer
    than a round may take is shown where it stands, and the process ends."""
    terminal = Console(stderr=True).is_terminal
    with live_line() as update:

        def show(row: Row, tally: Tally, over: bool) -> None:
            faulthandler.dump_traceback_later(2 * ROUND, exit=True, file=sys.__stderr__ or 2)
            text = (
                f"{row.name}, round {row.rounds + (not over)}: {tally.faults} faults, "
                f"{tally.finished} requests, {tally.verified_blocks} verified"
            )
            text += f", {len(tally.errors)} violations"
            update(text)
            if over and not terminal:
                print(text, file=sys.stderr, flush=True)

        try:
            yield show
        finally:
            faulthandler.cancel_dump_traceback_later()


def print_chaos(report: ChaosReport, console: Console) -> None:
    """The table."""
    title = f"chaos, seed {report.seed}, {report.wall_s:.0f} s"
    rows = (cells_of(row) for row in report.rows)
    print_rows(title, TITLES, rows, console, numbers=range(1, len(TITLES) - 1), wrapped=False)


def cells_of(row: Row) -> tuple[list[str], str | None]:
    """The cells of a situation, and their style."""
    tally = row.tally
    counts = (
        row.rounds,
        tally.faults,
        tally.finished,
        tally.verified_blocks,
        tally.corrupt_blocks_served,
        len(tally.errors),
    )
    figures = (f"{count:,} {what}" for what, count in tally.figures.items())
    words = "; ".join([*tally.errors, *figures, *tally.notes])
    style = (
        "red"
        if tally.errors or tally.corrupt_blocks_served
        else None
        if tally.available
        else "yellow"
    )
    return [row.name, *(f"{count:,}" for count in counts), words], style
