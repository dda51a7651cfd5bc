"""How late the loop is: idle, and with copies and storage saturated, in one run. Then the longest
callbacks of large work."""

from __future__ import annotations

import asyncio
import gc
import random
import tempfile
import time
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from kvactors.bench import callbacks
from kvactors.bench.report import Row, bench_report, time_row
from kvactors.cache import KVCache, open_cache
from kvactors.config import Config
from kvactors.errors import NoRoom
from kvactors.observe.lag import Lag, LagMonitor, Lags
from kvactors.terminable import run_terminable

Prompts = list[NDArray[np.int64]]

BLOCK, PROMPT_BLOCKS = 64, 16
ABOVE_IDLE = 1.0


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
        order = random.Random(seed)  # noqa: S311  (which prompt comes next is no secret)
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


async def measure(seconds: float) -> tuple[Lags, Lags, int, float]:
    """Idle lag, saturated lag, requests served, and gigabytes moved."""
    prompts = make_prompts()
    with tempfile.TemporaryDirectory(prefix="kvactors-lag-") as folder:
        async with open_cache(config(folder)) as cache:
            gc.collect()
            gc.freeze()  # as a server does after its start: the imports are no garbage
            try:
                async with LagMonitor().running() as idle:
                    await anyio.sleep(seconds)
                async with LagMonitor().running() as busy:
                    served = await churn(cache, prompts, seconds)
            finally:
                gc.unfreeze()
            await cache.wait_idle()
            statistics = cache.statistics()
            blocks = statistics.host.loaded + statistics.host.offloaded
            if statistics.store is not None:
                blocks += statistics.store.reads + statistics.store.writes
            return (
                idle.results(),
                busy.results(),
                served,
                blocks * cache.system.layout.block_bytes / 1e9,
            )


def lag_rows(part: str, idle: Lag, busy: Lag) -> list[Row]:
    """The percentiles of a part of the lag."""
    rows: list[Row] = []
    for name in ("p50", "p99", "p999"):
        limit = getattr(idle, name) + ABOVE_IDLE
        above = f"idle in the same run + {ABOVE_IDLE:g} ms"
        rows += [
            time_row(f"saturated, {name}{part}", ms(busy, name), limit, "ms", above),
            time_row(f"idle, {name}{part}", ms(idle, name), ABOVE_IDLE, "ms", f"{ABOVE_IDLE:g} ms"),
        ]
    return rows


def ms(lag: Lag, name: str) -> float:
    """A percentile. A lag of nothing is a microsecond: a row has a ratio."""
    return max(1e-3, float(getattr(lag, name)))


def run(*, quick: bool = False) -> dict[str, Any]:
    """All rows. quick: a moment only, for tests."""
    seconds = 0.5 if quick else 10.0
    idle, busy, served, gigabytes = run_terminable(measure(seconds))
    rows = lag_rows("", idle.wall, busy.wall)
    if idle.own is not None and busy.own is not None:
        rows += lag_rows(", without waits for a core", idle.own, busy.own)
    rows += lag_rows(", processor time", idle.cpu, busy.cpu)
    rows += run_terminable(callbacks.rows(quick=quick))
    settings = {
        "seconds": seconds,
        "served": served,
        "gigabytes_moved": round(gigabytes, 2),
        "quick": quick,
    }
    return bench_report("lag", rows, settings)
