"""A process that writes to a file store and is killed (SIGKILL) again and again.

`python -m tests.support.killed_writer FOLDER FIRST` is such a process: it writes blocks FIRST,
FIRST + 1, .. with durability `synced`, and prints a line `stored N N ..` or `gone N N ..` for each
batch.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import anyio
import numpy as np
import structlog

from kvactors.device.arena import Arena
from kvactors.errors import KVActorsError
from kvactors.storage.file.store import FileBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import Bench, key, never
from tests.support.child import child

PRINT = bytes(range(32))
SIZE = 20_000
CAPACITY = 60
BATCH = 8


class Storm(NamedTuple):
    """The outcome. announced: blocks reported as stored and not as gone, over all rounds. missing:
    of those, not present (blocks that the batch in flight was evicting may be gone without a
    report, and do not count). served: blocks read back right. wrong: anything else."""

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


async def kill_loop(folder: Path, rounds: int, seed: int = 0) -> Storm:
    """Kill a writer `rounds` times at random moments. After each, open the store and read
    everything that it holds."""
    rng, first = random.Random(seed), 0
    announced = missing = served = wrong = 0
    for number in range(rounds):
        said = await run_and_kill(folder, first, rng.uniform(0.0, 0.08), patient=number % 2 == 0)
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


async def run_and_kill(folder: Path, first: int, seconds: float, *, patient: bool) -> set[int]:
    """Run a writer and kill it.

    Args:
        folder: of the store.
        first: number of the first block it writes.
        seconds: how long it runs after it has opened its store.
        patient: let the time begin when it has stored a batch, however slow the disk is.

    Returns:
        Blocks that it announced as stored and not as gone.
    """
    stored: set[int] = set()

    async def take() -> str:
        word, *rest = (await writer.receive()).split()
        numbers = {int(one) for one in rest}
        if word == "gone":
            stored.difference_update(numbers)
        elif word == "stored":
            stored.update(numbers)
        return word

    arguments = ("-m", "tests.support.killed_writer", str(folder), str(first))
    async with child(*arguments) as writer:
        with suppress(KVActorsError):  # it has ended
            await take()
            while patient and await take() != "stored":
                pass
            await anyio.sleep(seconds)
            writer.signal(signal.SIGKILL)
            while True:
                await take()
    return stored


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(write(sys.argv[1], int(sys.argv[2])))
