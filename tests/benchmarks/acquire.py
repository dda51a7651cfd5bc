"""Requests that hit the device, through the actors: how many a second, and how long an acquire
takes.

The limits are the bars the runtime was built to: 40,000 requests a second from one client and
60,000 from eight, 20 microseconds an ask, 25 microseconds of processor for a request of 64 or of
512 clients. The same requests are served on uvloop if it is
installed. The processor time of the loop's thread for a request stands beside the rate: a busy
machine changes it less.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvactors.cache import KVCache, open_cache
from kvactors.settings import Config
from kvactors.signals import run_terminable
from tests.benchmarks.report import Row, bench_report, rate_row, time_row

BLOCK = 64
PROMPT = 8192 + 8
"""Tokens: 128 whole blocks, which all hit, and a tail to compute, as a model always needs one
token."""
CLIENTS = 8
CROWDS = (64, 512)
"""Clients that wait for each other's turns, each with another tail on one of 64 prompts."""
DISTINCT = 64
ROUNDS = 7
ALONE_PER_S, TOGETHER_PER_S = 40_000.0, 60_000.0
ASK_US = 20.0
CROWD_US = 25.0
ASKS = 3
"""Of a request that hits: acquire, commit, finish."""


def run(*, quick: bool = False) -> dict[str, Any]:
    """All rows. quick: a few requests only, for tests."""
    rows, requests = run_terminable(measure(1_000 if quick else 20_000))
    rows += run_terminable(throughput_of(requests, "lru", ", LRU"))
    rows += on_uvloop(requests)
    rows += [run_terminable(crowd_row(clients, requests)) for clients in CROWDS]
    settings = {
        "prompt_tokens": PROMPT,
        "block_size": BLOCK,
        "requests": requests,
        "rounds": ROUNDS,
        "dtype": "int64",
        "quick": quick,
    }
    return bench_report("acquire", rows, settings)


def config(policy: str = "retain", clients: int = CLIENTS) -> Config:
    """A device that holds the blocks of every client twice. policy: of eviction, the default one if
    not given."""
    return Config.from_mapping(
        {
            "cache": {"block_size": BLOCK},
            "device": {"num_blocks": 2 * clients * (PROMPT // BLOCK + 1), "policy": policy},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8},
        }
    )


async def serve_each(cache: KVCache) -> list[NDArray[np.int64]]:
    """A prompt for each client, served once."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 150_000, PROMPT) for _ in range(CLIENTS)]
    for prompt in prompts:
        await serve(cache, prompt)
    return prompts


def on_uvloop(requests: int) -> list[Row]:
    """The rows of throughput on uvloop, none if it is not installed."""
    try:
        import uvloop
    except ImportError:
        return []

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(throughput_of(requests, "retain", ", uvloop"))


async def throughput_of(requests: int, policy: str, suffix: str) -> list[Row]:
    """The rows of throughput of another cache."""
    async with open_cache(config(policy)) as cache:
        return await throughput_rows(cache, await serve_each(cache), requests, suffix)


async def throughput_rows(
    cache: KVCache, prompts: list[NDArray[np.int64]], requests: int, suffix: str = ""
) -> list[Row]:
    """Rates of one client and of several, and the processor time of a request: medians of rounds
    taken in turn."""
    counts = {1: ALONE_PER_S, len(prompts): TOGETHER_PER_S}
    rates: dict[int, list[float]] = {count: [] for count in counts}
    times: dict[int, list[float]] = {count: [] for count in counts}
    for _ in range(ROUNDS):
        for count in counts:
            began = time.thread_time()
            rates[count].append(await throughput(cache, prompts[:count], requests // 2))
            times[count].append((time.thread_time() - began) / (requests // 2) * 1e6)
    rows: list[Row] = []
    for count, bar in counts.items():
        clients = "one client" if count == 1 else f"{count} clients"
        rate, took = median(rates[count]), median(times[count])
        rows += [
            rate_row(f"acquire to finish, {clients}{suffix}", rate, bar, "requests/s", "the bar"),
            time_row(f"processor time, {clients}{suffix}", took, 1e6 / bar, "us", "1 / the bar"),
        ]
    return rows


async def crowd_row(clients: int, requests: int) -> Row:
    """The processor time of a request of many clients."""
    rng = np.random.default_rng(0)
    shared = [rng.integers(0, 150_000, PROMPT - 1) for _ in range(min(clients, DISTINCT))]
    prompts = [np.append(shared[i % len(shared)], i) for i in range(clients)]
    times: list[float] = []
    async with open_cache(config(clients=clients)) as cache:
        for prompt in prompts:
            await serve(cache, prompt)
        for _ in range(ROUNDS):
            each = max(1, requests // 2 // clients)
            began = time.thread_time()
            await throughput(cache, prompts, each * clients)
            times.append((time.thread_time() - began) / (each * clients) * 1e6)
    took, name = median(times), f"processor time, {clients} clients"
    return time_row(name, took, CROWD_US, "us", "the bar")


async def measure(requests: int) -> tuple[list[Row], int]:
    """All rows, and how many requests each took."""
    async with open_cache(config()) as cache:
        prompts = await serve_each(cache)
        rows = await throughput_rows(cache, prompts, requests)
        together = rows[2].ours
        acquire, ask = await latencies(cache, prompts[0], requests)
        bare = await bare_loop(requests)
        missed = (
            cache.statistics().blocks_looked_up
            - cache.statistics().device_hits
            - CLIENTS * (PROMPT // BLOCK)
        )
    assert missed == 0, f"{missed} blocks missed in what should have been hits"
    bar = "the bar"
    rows += [
        time_row("acquire, p50", acquire[0], ASK_US, "us", bar),
        time_row("acquire, p99", acquire[1], ASK_US, "us", bar),
        time_row("commit of nothing new (a bare ask), p50", ask[0], ASK_US, "us", bar),
        time_row("commit of nothing new (a bare ask), p99", ask[1], ASK_US, "us", bar),
        rate_row(
            f"{CLIENTS} clients, against the bare loop",
            together,
            bare / ASKS,
            "requests/s",
            f"asyncio.sleep(0) rate / {ASKS}",
        ),
    ]
    return rows, requests


async def serve(cache: KVCache, prompt: NDArray[np.int64]) -> None:
    """Serve one request from acquire to finish, with the block table that an engine reads."""
    lease = await cache.acquire("bench", prompt)
    await lease.wait_ready()
    if len(lease.block_table) * BLOCK < PROMPT:
        raise RuntimeError("the lease has too few blocks")
    await lease.commit(PROMPT)
    await lease.finish()


async def throughput(cache: KVCache, prompts: list[NDArray[np.int64]], requests: int) -> float:
    """Requests a second with one client per prompt."""

    async def client(prompt: NDArray[np.int64]) -> None:
        for _ in range(requests // len(prompts)):
            await serve(cache, prompt)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(client(prompt))
    return requests // len(prompts) * len(prompts) / (time.perf_counter() - began)


async def latencies(
    cache: KVCache, prompt: NDArray[np.int64], requests: int
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Median and 99th percentile in microseconds of an acquire, and of an ask with nothing to
    do."""
    acquires, asks = np.empty(requests), np.empty(requests)
    clock = time.perf_counter
    for i in range(requests):
        began = clock()
        lease = await cache.acquire("bench", prompt)
        acquires[i] = clock() - began
        await lease.commit(PROMPT)
        began = clock()
        await lease.commit(PROMPT)
        asks[i] = clock() - began
        await lease.finish()
    return percentiles(acquires), percentiles(asks)


def percentiles(seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Median and 99th percentile, in microseconds."""
    p50, p99 = np.percentile(seconds * 1e6, [50, 99])
    return float(p50), float(p99)


async def bare_loop(passes: int) -> float:
    """Passes a second of a loop with nothing to do."""
    began = time.perf_counter()
    for _ in range(passes):
        await asyncio.sleep(0)
    return passes / (time.perf_counter() - began)
