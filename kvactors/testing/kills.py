"""Killing a process that writes to a file store, again and again (SIGKILL), and looking each time
at what is left.

`python -m kvactors.testing.kills FOLDER FIRST` is such a process: it writes blocks FIRST, FIRST +
1, .. for ever, with durability `synced`, and says a line `stored N N ..` or `gone N N ..` for each
batch once that is so.
"""

from __future__ import annotations

import asyncio
import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import numpy as np
import structlog

from kvactors.actor.uncancelled import uncancelled
from kvactors.device.arena import Arena
from kvactors.storage.backends.file import FileBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import Bench, key, never

PRINT = bytes(range(32))
SIZE = 20_000
CAPACITY = 60
BATCH = 8


class Storm(NamedTuple):
    """What came of it. announced: blocks said to be stored and not said to be gone, over all
    rounds. missing: of those, not there (blocks that the batch under way was evicting may be gone
    without a word, and do not count). served: blocks read back right. wrong: anything else."""

    rounds: int
    announced: int
    missing: int
    served: int
    wrong: int


async def write(folder: str, first: int) -> None:
    """Write until killed."""
    store, arena = (
        FileBackend(folder, PRINT, SIZE, CAPACITY, durability="synced"),
        Arena(BATCH, SIZE),
    )
    await store.open()
    await store.attach(arena)
    print("open", flush=True)
    while True:
        views, numbers = [arena.view(i) for i in range(BATCH)], range(first, first + BATCH)
        for view, number in zip(views, numbers, strict=True):
            view[:] = np.random.default_rng(number).integers(0, 256, SIZE, np.uint8).data
        report = await store.write([key(n) for n in numbers], views, never)
        print("gone", *(int.from_bytes(one[:8], "big") for one in report.evicted), flush=True)
        stored = (
            n for n, outcome in zip(numbers, report.outcomes, strict=True) if outcome == Outcome.OK
        )
        print("stored", *stored, flush=True)
        first += BATCH


async def storm(folder: Path, rounds: int, seed: int = 0) -> Storm:
    """Kill a writer `rounds` times at random moments; after each, open the store and read
    everything that it holds."""
    rng, first = random.Random(seed), 0  # noqa: S311  (when to kill is no secret)
    announced = missing = served = wrong = 0
    for number in range(rounds):
        said = await one_life(folder, first, rng.uniform(0.0, 0.08), patient=number % 2 == 0)
        first = max(said, default=first) + BATCH + 1
        store, arena = FileBackend(folder, PRINT, SIZE, CAPACITY), Arena(1, SIZE)
        await store.open()
        await store.attach(arena)
        bench, names = Bench(store, arena), store.keys()
        held = [int.from_bytes(name[:8], "big") for name in names]
        going = set(sorted(said)[: 2 * BATCH])
        announced += len(said)
        missing += len(said - set(held) - going)
        for number in held:
            try:
                right = await bench.get(number) == [Outcome.OK]
            except AssertionError:
                right = False
            served += right
            wrong += not right
        await store.close()
        arena.close()
    return Storm(rounds, announced, missing, served, wrong)


async def one_life(folder: Path, first: int, seconds: float, *, patient: bool) -> set[int]:
    """Run a writer for some seconds after it has opened its store (patient: after it has stored a
    batch, however slow the disk is); what it announced as stored and not as gone."""
    command = [sys.executable, "-P", "-m", "kvactors.testing.kills", str(folder), str(first)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        lines = await _life(process, seconds, patient=patient)
    finally:
        await uncancelled(_end(process))  # nothing writes in the folder when this returns
    said: set[int] = set()
    for line in lines:
        word, *rest = line.split() or [b""]
        numbers = {int(one) for one in rest}
        if line.endswith(b"\n"):
            said = said - numbers if word == b"gone" else said | numbers
    return said


async def _life(
    process: asyncio.subprocess.Process, seconds: float, *, patient: bool
) -> list[bytes]:
    assert process.stdout is not None
    await process.stdout.readline()
    lines: list[bytes] = []
    while patient and not (lines and lines[-1].startswith(b"stored")):
        lines.append(await process.stdout.readline())
        if not lines[-1]:
            break  # it has ended by itself
    await anyio.sleep(seconds)
    process.kill()
    return lines + (await process.stdout.read()).splitlines(keepends=True)


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(write(sys.argv[1], int(sys.argv[2])))
