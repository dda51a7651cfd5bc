"""How late the loop is: idle, woken by another thread, and with copies and storage saturated, in
turns. Then the longest callbacks of large work."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.cache import KVCache, open_cache
from kvactors.errors import NoRoom
from kvactors.observe.lag import Lag, LagMonitor, Lags
from kvactors.settings import Config
from kvactors.signals import run_terminable
from tests.benchmarks import callbacks
from tests.benchmarks.report import Row, bench_report, time_row

Prompts = list[NDArray[np.int64]]

BLOCK, PROMPT_BLOCKS = 64, 16
ABOVE_IDLE = 1.0

WAKE_EVERY = 0.0005
"""Mean seconds between two wake-ups of the loop by a thread."""

WOKEN = f"the idle loop, woken {1 / WAKE_EVERY:,.0f} times a second by a thread, same run"

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
    """idle, woken, busy: of each round. served: requests. gigabytes: moved by copies and the
    store."""

    idle: list[Lags]
    woken: list[Lags]
    busy: list[Lags]
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


async def measure(seconds: float, rounds: int) -> Measured:
    """Lags of a cache that is idle for so many seconds, then woken, and then saturated for as long,
    in turn."""
    prompts = make_prompts()
    idle, woken, busy, served = [], [], [], 0
    with tempfile.TemporaryDirectory(prefix="kvactors-lag-") as folder:
        async with open_cache(config(folder)) as cache:
            with settled_collector():
                for _ in range(rounds):
                    async with LagMonitor().running() as monitor:
                        await anyio.sleep(seconds)
                    idle.append(monitor.results())
                    with wake_ups():
                        async with LagMonitor().running() as monitor:
                            await anyio.sleep(seconds)
                    woken.append(monitor.results())
                    async with LagMonitor().running() as monitor:
                        served += await churn(cache, prompts, seconds)
                    busy.append(monitor.results())
                    await cache.wait_idle()
            statistics = cache.statistics()
            blocks = statistics.host.loaded + statistics.host.offloaded
            if statistics.store is not None:
                blocks += statistics.store.reads + statistics.store.writes
            moved = blocks * cache.system.layout.block_bytes / 1e9
            return Measured(idle, woken, busy, served, moved)


def medians(lags: list[Lag]) -> Lag:
    """The median of each percentile."""
    return Lag(*(median(values) for values in zip(*lags, strict=True)))


def lag_rows(part: str, idle: list[Lag], woken: list[Lag], busy: list[Lag]) -> list[Row]:
    """The percentiles of a part of the lag, medians of the rounds. woken: may be empty."""
    rows: list[Row] = []
    above = f"idle in the same run + {ABOVE_IDLE:g} ms"
    for name in ("p50", "p99", "p999"):
        calm = ms(medians(idle), name)
        saturated = ms(medians(busy), name)
        rows += [
            time_row(f"saturated, {name}{part}", saturated, calm + ABOVE_IDLE, "ms", above),
            time_row(f"idle, {name}{part}", calm, ABOVE_IDLE, "ms", f"{ABOVE_IDLE:g} ms"),
        ]
        if woken:
            rows.append(
                time_row(
                    f"saturated, {name}{part}, beside a woken loop",
                    saturated,
                    ms(medians(woken), name),
                    "ms",
                    WOKEN,
                )
            )
    return rows


def ms(lag: Lag, name: str) -> float:
    """A percentile. A lag of nothing is a microsecond: a row has a ratio."""
    return max(1e-3, float(getattr(lag, name)))


def run(*, quick: bool = False) -> dict[str, Any]:
    """All rows. quick: a moment only, for tests."""
    seconds, rounds = (0.5, 1) if quick else (5.0, ROUNDS)
    measured = run_terminable(measure(seconds, rounds))
    phases = (measured.idle, measured.woken, measured.busy)
    rows = lag_rows("", *([one.wall for one in phase] for phase in phases))
    own = [[one.own for one in phase if one.own] for phase in phases]
    if all(own):
        rows += lag_rows(", without waits for a core", *own)
    idle, busy = ([one.cpu for one in phase] for phase in (measured.idle, measured.busy))
    rows += lag_rows(", processor time", idle, [], busy)
    rows += run_terminable(callbacks.rows(quick=quick))
    settings = {
        "rounds": rounds,
        "seconds": seconds,
        "served": measured.served,
        "gigabytes_moved": round(measured.gigabytes, 2),
        "collect_after": COLLECT_AFTER,
        "quick": quick,
    }
    return bench_report("lag", rows, settings)
