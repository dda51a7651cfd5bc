"""A process on a file store, killed with SIGKILL and started again. It reports its clears through a
pipe before they can matter."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import structlog

import kvactors
from tests.load.client import Client

from .draw import draw
from .history import History
from .record import Record
from .run import counter
from .world import World

ROOT = Path(__file__).parents[2]
LIVES = 4
START = 60.0
"""Seconds a child may take to start."""


def run_killed(seed: int) -> Record:
    """Several processes one after another on one store. Each is killed at a random moment, except
    the last one."""
    rng, record = random.Random(f"killed {seed}"), Record()
    folder = tempfile.mkdtemp(prefix="kvk-")
    begun = floor = 0
    try:
        for life in range(LIVES):
            last = life == LIVES - 1
            arguments = [str(one) for one in (seed, life, begun, floor, int(last))]
            child = subprocess.Popen(
                [sys.executable, "-m", "tests.oracle.killed", folder, *arguments],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            lines, errors = _watch(child, None if last else rng.uniform(0.02, 0.5))
            record.seen["killed" if child.returncode == -9 else "ended by itself"] += 1
            if child.returncode not in ((0,) if last else (0, -9)):
                record.fail(
                    f"seed {seed} killed, process {life}: exit status {child.returncode}: "
                    f"{errors[-2000:]}"
                )
            for line in lines:
                kind, _, rest = line.partition(" ")
                if kind == "clear":
                    begun = int(rest)
                elif kind == "cleared":
                    floor = int(rest)
                    record.seen["clear in a killed process"] += 1
                elif kind == "hits":
                    record.verified += int(rest)
                elif kind == "wrong":
                    record.wrong += 1
                    record.fail(f"seed {seed} killed, process {life}: {rest}")
                elif kind == "failed":
                    record.fail(f"seed {seed} killed, process {life}: {rest}")
                elif kind == "request":
                    record.requests += 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return record


def _watch(child: subprocess.Popen[str], seconds: float | None) -> tuple[list[str], str]:
    assert child.stdout is not None
    lines, began = [], time.monotonic()
    for line in child.stdout:
        if line.strip() == "open":
            break
        lines.append(line.strip())
        if time.monotonic() - began > START:
            break
    if seconds is not None:
        time.sleep(seconds)
        child.kill()
    out, errors = child.communicate(timeout=300)
    return lines + [
        line.strip() for line in out.splitlines() if line.endswith(tuple("0123456789)"))
    ], errors


def say(*words: object) -> None:
    """One line to the parent, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


async def child(folder: str, seed: int, life: int, begun: int, floor: int, *, last: bool) -> None:
    """Requests and clears on the store of `folder`, until killed unless this is the last
    process."""
    drawn = draw(seed, folder, store="file", threads=False, sinks=False)
    drawn.mix.orders = {"prefetch": 1}
    drawn.mix.hostile = 0.0
    record, history = Record(), History(begun, floor)
    rng = random.Random(f"child {seed} {life}")
    async with kvactors.open(kvactors.Config.from_mapping(drawn.tables)) as cache:
        say("open")
        world = World(cache, drawn, history, record)
        rounds = 0
        while not last or rounds < 3:
            rounds += 1
            requests = [rng.randint(1, 40)]
            before = record.verified
            await asyncio.gather(
                *(
                    Client(world, f"{seed} {life} {rounds} {i}", counter(requests)).run()
                    for i in range(drawn.clients)
                )
            )
            say("hits", record.verified - before)
            say("request", record.requests)
            for what in record.failures:
                say(
                    "wrong" if record.wrong else "failed",
                    what.replace("\n", " "),
                    f"(round {rounds})",
                )
            record.failures.clear()
            if rng.random() < 0.3:
                say("clear", history.begun + 1)
                await Client(world, f"clear {rounds}", lambda: False).clear(storage=True)
                say("cleared", history.begun)
                if rng.random() < 0.3:
                    await asyncio.sleep(0.2)  # a moment in which the process is likely to be killed
        if last:
            await world.rest(rng)
            for what in record.failures:
                say("failed", what.replace("\n", " "), "(rest)")


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    folder, *numbers = sys.argv[1:]
    seed, life, begun, floor, last = map(int, numbers)
    asyncio.run(child(folder, seed, life, begun, floor, last=bool(last)))
