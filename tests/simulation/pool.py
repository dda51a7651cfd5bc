"""Many seeds on several cores. Every worker process has the same hash seed, so that a run is the
same wherever it is replayed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing.connection import wait as wait_for
from types import FrameType
from typing import NoReturn

from tests.simulation.record import SeedReport
from tests.simulation.run import run_seed

CHUNK = 8
"""Seeds a worker does at a time."""

LIFE = 200
"""Chunks after which a worker process is replaced."""

STUCK = 30.0
"""Seconds of processor time a seed may take. A seed that takes longer is stuck: virtual time or the
loop stands still. Time spent waiting on a busy machine does not count."""


class Stuck(KeyboardInterrupt):
    """The alarm of a seed that takes too long: a loop passes nothing else on."""


def run_chunk(
    first: int, count: int, keep: int, direct: float = 0.0, sharing: bool = False
) -> list[SeedReport]:
    """Seeds first, first + 1, .. in this process. keep: lines of each trace. direct,
    sharing: see `run_seed`."""
    return [_guarded(seed, keep, direct, sharing) for seed in range(first, first + count)]


def _guarded(seed: int, keep: int, direct: float, sharing: bool) -> SeedReport:
    before = signal.signal(signal.SIGPROF, _alarm)
    signal.setitimer(signal.ITIMER_PROF, STUCK)
    try:
        return run_seed(seed, keep=keep, direct=direct, sharing=sharing)
    except Stuck as stuck:
        return SeedReport(seed, [f"stuck for {STUCK:.0f} s of processor time at {stuck}"])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def _alarm(_number: int, frame: FrameType | None) -> NoReturn:
    raise Stuck(f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown place")


def end_with_parent() -> None:
    """End this worker process when the process that started it ends, however it ends."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    sentinel = parent.sentinel

    def watch() -> None:
        wait_for([sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


@contextmanager
def _same_hashes() -> Iterator[None]:
    """Processes started inside the context have hash seed 0."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = before


def run_seeds(
    first: int,
    seeds: int,
    processes: int,
    *,
    until: float = float("inf"),
    keep: int = 50,
    direct: float = 0.0,
    sharing: bool = False,
) -> Iterator[SeedReport]:
    """Reports as they come. until: `time.monotonic()` after which no more seeds are begun. direct,
    sharing: see `run_seed`."""
    context = multiprocessing.get_context("spawn")
    with (
        _same_hashes(),
        ProcessPoolExecutor(
            processes, mp_context=context, max_tasks_per_child=LIFE, initializer=end_with_parent
        ) as pool,
    ):
        open_: set[Future[list[SeedReport]]] = set()
        following, last = first, first + seeds
        while open_ or (following < last and time.monotonic() < until):
            while len(open_) < 2 * processes and following < last and time.monotonic() < until:
                count = min(CHUNK, last - following)
                open_.add(pool.submit(run_chunk, following, count, keep, direct, sharing))
                following += count
            done, open_ = wait(open_, return_when=FIRST_COMPLETED)
            for future in done:
                yield from future.result()
