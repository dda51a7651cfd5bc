"""How late the loop is: idle, woken by another thread, and with copies and storage saturated, in
turns. Then the longest callbacks of large work."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from statistics import median
from typing import NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.cache import KVCache
from kvactors.errors import NoRoom
from kvactors.observe.lag import LagMonitor, Lags
from kvactors.opening import open_cache
from kvactors.settings import Config
from kvactors.signals import run_terminable
from tests.benchmarks import callbacks
from tests.benchmarks.frame import Report, Row, time_row

Prompts = list[NDArray[np.int64]]

BLOCK, PROMPT_BLOCKS = 64, 16
ABOVE_IDLE = 1.0

WAKE_EVERY = 0.0005
"""Mean seconds between two wake-ups of the loop by a thread."""

WOKEN = "the woken loop"

ROUNDS = 7
"""Idle, woken and saturated in turn. A figure is the median of the rounds."""

COLLECT_AFTER = 50_000
"""New objects before a pass of the cyclic garbage collector, as docs/how-to/tune.md advises."""


def config(folder: str) -> Config:
    """Small tiers over a file store, blocks of 1 MiB: nearly every request offloads, loads, writes
    and reads."""
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK},
            "device": {"num_blocks": 64},
            "layout": {"num_layers": 16, "num_kv_heads": 4, "head_dim": 128, "dtype": "float16"},
            "host": {"slots": 64, "transit_slots": 128},
            "storage": {"backend": "file", "directory": folder, "capacity_blocks": 256},
            "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
        }
    )


def make_prompts() -> Prompts:
    """More prompts than the tiers hold."""
    return [
        np.random.default_rng(i).integers(0, 150_000, BLOCK * PROMPT_BLOCKS + 1) for i in range(24)
    ]


async def churn(cache: KVCache, prompts: Prompts, seconds: float) -> int:
    """Send requests of random old prompts, a few at once, until the time is over. Returns the
    number of requests served."""
    until, served = time.monotonic() + seconds, 0

    async def client(seed: int) -> None:
        nonlocal served
        order = random.Random(seed)
        while time.monotonic() < until:
            try:
                async with await cache.acquire("churn", order.choice(prompts)) as lease:
                    await lease.wait_ready()
                    await lease.commit(lease.num_tokens)
                served += 1
            except NoRoom:
                await anyio.sleep(0.001)

    await asyncio.gather(*(client(seed) for seed in range(3)))
    return served


class Measured(NamedTuple):
    """The lags of each round by phase, and what the cache did in the saturated ones."""

    phases: dict[str, list[Lags]]
    served: int
    gigabytes: float


@contextmanager
def wake_ups() -> Iterator[None]:
    """A thread wakes the loop at random moments, with nothing to do. A selector waits in whole
    milliseconds, rounded up: each wake-up makes the next timer up to a millisecond late."""
    loop, delays, wanted = asyncio.get_running_loop(), random.Random(0), True

    def wake() -> None:
        while wanted:
            time.sleep(delays.expovariate(1 / WAKE_EVERY))
            loop.call_soon_threadsafe(int)

    thread = threading.Thread(target=wake, name="kvactors-bench-wake")
    thread.start()
    try:
        yield
    finally:
        wanted = False
        thread.join()


@contextmanager
def settled_collector() -> Iterator[None]:
    """The cyclic garbage collector as a server sets it after its start: the imports are no garbage,
    and neither are the objects of requests in flight."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@asynccontextmanager
async def phase(into: list[Lags]) -> AsyncIterator[None]:
    """Measure the lag of the loop during the block."""
    async with LagMonitor().running() as monitor:
        yield
    into.append(monitor.results())


async def measure(seconds: float, rounds: int) -> Measured:
    """Lags of a cache that is idle for so many seconds, then woken, and then saturated for as long,
    in turn."""
    prompts, served = make_prompts(), 0
    phases: dict[str, list[Lags]] = {"idle": [], "woken": [], "busy": []}
    with tempfile.TemporaryDirectory(prefix="kvactors-lag-") as folder:
        async with open_cache(config(folder)) as cache:
            with settled_collector():
                for _ in range(rounds):
                    async with phase(phases["idle"]):
                        await anyio.sleep(seconds)
                    with wake_ups():
                        async with phase(phases["woken"]):
                            await anyio.sleep(seconds)
                    async with phase(phases["busy"]):
                        served += await churn(cache, prompts, seconds)
                    await cache.wait_idle()
            statistics = cache.statistics()
            blocks = statistics.host.loaded + statistics.host.offloaded
            if statistics.store is not None:
                blocks += statistics.store.reads + statistics.store.writes
            return Measured(phases, served, blocks * cache.system.layout.block_bytes / 1e9)


def lag_rows(phases: dict[str, list[Lags]], part: str, suffix: str = "") -> list[Row]:
    """The percentiles of a part of the lag, medians of the rounds. Empty where the system does not
    count it."""
    found: dict[str, list[dict[str, float]]] = {
        name: [lag for lags in rounds if (lag := lags[part])] for name, rounds in phases.items()
    }
    rows: list[Row] = []
    for name in ("p50", "p99", "p999"):
        if not all(found.values()):
            return []
        # a lag of nothing is a microsecond: a row has a ratio
        idle, woken, busy = (
            max(1e-3, median(lag[name] for lag in lags)) for lags in found.values()
        )
        case, above = f"saturated, {name}{suffix}", f"idle + {ABOVE_IDLE:g} ms"
        rows += [
            time_row(case, busy, idle + ABOVE_IDLE, "ms", above),
            time_row(f"{case}, beside a woken loop", busy, woken, "ms", WOKEN),
        ]
    return rows


def run(*, quick: bool = False) -> Report:
    """All rows."""
    seconds, rounds = (0.5, 1) if quick else (5.0, ROUNDS)
    measured = run_terminable(measure(seconds, rounds))
    rows = lag_rows(measured.phases, "wall")
    rows += lag_rows(measured.phases, "own", ", without waits for a core")
    rows += run_terminable(callbacks.rows(quick=quick))
    settings = {
        "rounds": rounds,
        "seconds": seconds,
        "served": measured.served,
        "gigabytes_moved": round(measured.gigabytes, 2),
        "collect_after": COLLECT_AFTER,
        "quick": quick,
    }
    return Report(rows, settings)
