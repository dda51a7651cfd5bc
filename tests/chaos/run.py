"""Rounds of situations, one after the other, until the time is up."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import anyio

from kvactors.errors import DeadlineExceeded
from kvactors.scenario.engine import beside
from tests.chaos.record import ChaosReport, Row, Setting, Situation, Tally

ROUND = 180.0
"""Seconds after which a round counts as hanging."""

Progress = Callable[[Row, Tally, bool], None]
"""Called with a row, the tally of its current round, and whether that round is over."""

GLANCE = 0.25
"""Seconds between two reports of progress."""


def silent(_: Row, __: Tally, ___: bool) -> None:
    """Show nothing."""


async def one_round(
    situation: Situation,
    seed: int,
    folder: Path,
    *,
    small: bool = False,
    tally: Tally | None = None,
) -> Tally:
    """One round in its own folder. Every failure is a violation in the tally, never an error."""
    tally = Tally() if tally is None else tally
    rng = random.Random(f"{situation.name}:{seed}")
    try:
        with anyio.fail_after(ROUND):
            await situation.run(Setting(folder, rng, seed, small), tally)
    except DeadlineExceeded as error:
        tally.complain(f"hangs: {error}")
    except TimeoutError:
        tally.complain(f"hangs: the round was not over after {ROUND:.0f} s")
    except Exception as error:  # an unexpected error is a finding as well
        tally.complain(f"{type(error).__name__}: {error}")
    if tally.available and not (tally.faults and tally.finished and tally.verified_blocks):
        tally.complain("the round proves nothing: no fault, no request, or no block verified")
    return tally


async def chaos(
    chosen: Iterable[Situation],
    *,
    seed: int,
    minutes: float,
    progress: Progress = silent,
    small: bool = False,
) -> ChaosReport:
    """Situations in turn until the time is up, each at least once. Round n of a situation has the
    seed `seed + n`."""
    rows = {
        situation.name: (situation, Row(situation.name, situation.about)) for situation in chosen
    }
    began, number = time.monotonic(), 0
    while not number or time.monotonic() - began < 60 * minutes:
        for situation, row in rows.values():
            if number and (time.monotonic() - began >= 60 * minutes or not row.tally.available):
                continue
            await next_round(situation, row, seed + number, progress, small=small)
        number += 1
        if not any(row.tally.available for _, row in rows.values()):
            break
    return ChaosReport(
        seed, minutes, round(time.monotonic() - began, 1), [row for _, row in rows.values()]
    )


async def next_round(
    situation: Situation, row: Row, seed: int, progress: Progress, *, small: bool
) -> None:
    """One more round of a row."""
    tally = Tally()
    with tempfile.TemporaryDirectory(
        prefix=f"kvactors-chaos-{row.name}-", ignore_cleanup_errors=True
    ) as folder:
        async with beside(reporting(progress, row, tally)):
            await one_round(situation, seed, Path(folder), small=small, tally=tally)
    row.rounds += 1
    row.tally.add(tally)
    if tally.errors:
        row.repeat.append(f"python -m tests.chaos --only {row.name} --seed {seed} --minutes 0")
    progress(row, tally, True)


async def reporting(progress: Progress, row: Row, tally: Tally) -> None:
    """Report progress a few times a second."""
    while True:
        progress(row, tally, False)
        await anyio.sleep(GLANCE)
