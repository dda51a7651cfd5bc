"""Rounds of situations, one after the other, until the time is up."""

from __future__ import annotations

import faulthandler
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from importlib import import_module
from pathlib import Path

import anyio

from kvactors.errors import ConfigError, DeadlineExceeded
from kvactors.scenario.output import write_json
from kvactors.signals import run_terminable
from tests.chaos.record import Setting, Tally

ROUND = 180.0
"""Seconds after which a round counts as hanging."""

MODULES = (
    "killed",
    "stopped",
    "full_disk",
    "readers",
    "mooncake",
    "shared_folder",
    "bucket",
    "valkey",
    "damage",
    "read_only",
    "ranks",
    "attention_store",
)
"""The situations: modules of this package, each with the coroutine function `run` of one round."""

Run = Callable[[Setting, Tally], Awaitable[None]]


def situations(only: str = "") -> dict[str, Run]:
    """All, or the one of this name. ConfigError if there is none."""
    if only and only not in MODULES:
        raise ConfigError(f"there is no situation {only!r}: use one of {', '.join(MODULES)}")
    return {
        name: import_module(f"tests.chaos.{name}").run for name in MODULES if only in ("", name)
    }


async def one_round(name: str, run: Run, seed: int, *, small: bool = False) -> Tally:
    """One round in its own folder. Every failure is a violation in the tally, never an error."""
    tally, rng = Tally(), random.Random(f"{name}:{seed}")
    with tempfile.TemporaryDirectory(
        prefix=f"kvactors-chaos-{name}-", ignore_cleanup_errors=True
    ) as folder:
        try:
            with anyio.fail_after(ROUND):
                await run(Setting(Path(folder), rng, seed, small), tally)
        except DeadlineExceeded as error:
            tally.complain(f"hangs: {error}")
        except TimeoutError:
            tally.complain(f"hangs: the round was not over after {ROUND:.0f} s")
        except Exception as error:  # an unexpected error is a finding as well
            tally.complain(f"{type(error).__name__}: {error}")
    if tally.available and not (tally.faults and tally.finished and tally.verified_blocks):
        tally.complain("the round proves nothing: no fault, no request, or no block verified")
    return tally


async def chaos(chosen: Mapping[str, Run], *, seed: int, minutes: float) -> dict[str, Tally]:
    """Situations in turn until the time is up, each at least once, and a line for each round. Round
    n of a situation has the seed `seed + n`."""
    until = time.monotonic() + 60 * minutes
    tallies: dict[str, Tally] = {name: Tally() for name in chosen}
    number = 0
    while not number or time.monotonic() < until:
        for name, run in chosen.items():
            if number and (time.monotonic() >= until or not tallies[name].available):
                continue
            # a loop that stands still is shown where it stands, and the process ends
            faulthandler.dump_traceback_later(2 * ROUND, exit=True, file=sys.__stderr__ or 2)
            tally = await one_round(name, run, seed + number)
            faulthandler.cancel_dump_traceback_later()
            tallies[name].add(tally)
            print(
                f"{name}: {tally.faults} faults, {tally.finished} requests, "
                f"{tally.verified_blocks} verified, {tally.corrupt_blocks_served} wrong, "
                f"{len(tally.errors)} violations",
                flush=True,
            )
            for what in tally.errors:
                print(f"violated: {name}: {what}", file=sys.stderr)
            if tally.errors:
                repeat = f"python -m tests.chaos --only {name} --seed {seed + number} --minutes 0"
                print(f"repeat: {repeat}", file=sys.stderr)
        number += 1
        if not any(tally.available for tally in tallies.values()):
            break
    return tallies


def run_chaos(
    minutes: float = 1.0, seed: int | None = None, only: str = "", json: Path | None = None
) -> int:
    """Run, print, write. Returns the exit status, 0 only without violations. seed: from the time if
    None."""
    drawn = time.time_ns() // 1_000_000 % 1_000_000 if seed is None else seed
    print(f"seed {drawn}")
    tallies = run_terminable(chaos(situations(only), seed=drawn, minutes=minutes))
    for name, tally in tallies.items():
        figures = (f"{count:,} {what}" for what, count in tally.figures.items())
        if words := [*figures, *tally.notes]:
            print(f"{name}: {'; '.join(words)}")
    write_json(tallies, json)
    return 1 if any(tally.errors for tally in tallies.values()) else 0
