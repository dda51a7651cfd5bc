"""Requests that hit the device, through the actors: how many a second, and how long an acquire
takes.

The limits are the bars the runtime was built to: 40,000 requests a second from one client and
60,000 from eight, 20 microseconds an acquire, 25 microseconds of processor for a request of 64 or
of 512 clients. Processor time is that of the loop's thread: a busy machine changes it less.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

import numpy as np
from numpy.typing import NDArray

from kvactors.cache import KVCache
from kvactors.opening import open_cache
from kvactors.settings import Config
from kvactors.signals import run_terminable
from tests.benchmarks.frame import Report, Row, rate_row, time_row

BLOCK = 64
PROMPT = 8192 + 8
"""Tokens: 128 whole blocks, which all hit, and a tail to compute, as a model always needs one
token."""
CLIENTS = 8
CROWDS = (64, 512)
"""Clients that wait for each other's turns, each with another tail on one of 64 prompts."""
DISTINCT = 64
ROUNDS = 7
BARS_PER_S = {1: 40_000.0, CLIENTS: 60_000.0}
ACQUIRE_US = 20.0
CROWD_US = 25.0


def run(*, quick: bool = False) -> Report:
    """All rows."""
    requests = 1_000 if quick else 20_000
    rows = run_terminable(throughput_rows("retain", requests))
    rows += run_terminable(throughput_rows("lru", requests))
    rows += run_terminable(latency_rows(requests))
    rows += [run_terminable(crowd_row(clients, requests)) for clients in CROWDS]
    settings = {
        "prompt_tokens": PROMPT,
        "block_size": BLOCK,
        "requests": requests,
        "rounds": ROUNDS,
        "dtype": "int64",
        "quick": quick,
    }
    return Report(rows, settings)


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


async def serve(cache: KVCache, prompt: NDArray[np.int64]) -> None:
    """Serve one request from acquire to finish, with the block table that an engine reads."""
    lease = await cache.acquire("bench", prompt)
    await lease.wait_ready()
    if len(lease.block_table) * BLOCK < PROMPT:
        raise RuntimeError("the lease has too few blocks")
    await lease.commit(PROMPT)
    await lease.finish()


async def throughput(cache: KVCache, prompts: list[NDArray[np.int64]], each: int) -> float:
    """Requests a second, with one client a prompt."""

    async def client(prompt: NDArray[np.int64]) -> None:
        for _ in range(each):
            await serve(cache, prompt)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(client(prompt))
    return each * len(prompts) / (time.perf_counter() - began)


async def throughput_rows(policy: str, requests: int) -> list[Row]:
    """Rates of one client and of several: medians of rounds taken in turn."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 150_000, PROMPT) for _ in range(CLIENTS)]
    rates: dict[int, list[float]] = {count: [] for count in BARS_PER_S}
    async with open_cache(config(policy)) as cache:
        for prompt in prompts:
            await serve(cache, prompt)
        for _ in range(ROUNDS):
            for count in BARS_PER_S:
                each = requests // 2 // count
                rates[count].append(await throughput(cache, prompts[:count], each))
        statistics = cache.statistics()
    missed = statistics.blocks_looked_up - statistics.device_hits - CLIENTS * (PROMPT // BLOCK)
    assert missed == 0, f"{missed} blocks missed in what should have been hits"
    suffix = "" if policy == "retain" else f", {policy.upper()}"
    return [
        rate_row(
            f"acquire to finish, {'one client' if count == 1 else f'{count} clients'}{suffix}",
            median(rates[count]),
            bar,
            "requests/s",
            "the bar",
        )
        for count, bar in BARS_PER_S.items()
    ]


async def latency_rows(requests: int) -> list[Row]:
    """Median and 99th percentile of an acquire."""
    prompt = np.random.default_rng(0).integers(0, 150_000, PROMPT)
    seconds = np.empty(requests)
    async with open_cache(config()) as cache:
        await serve(cache, prompt)
        for number in range(requests):
            began = time.perf_counter()
            lease = await cache.acquire("bench", prompt)
            seconds[number] = time.perf_counter() - began
            await lease.commit(PROMPT)
            await lease.finish()
    found = np.percentile(seconds * 1e6, [50, 99])
    return [
        time_row(f"acquire, {name}", float(us), ACQUIRE_US, "us", "the bar")
        for name, us in zip(("p50", "p99"), found, strict=True)
    ]


async def crowd_row(clients: int, requests: int) -> Row:
    """The processor time of a request of many clients."""
    rng = np.random.default_rng(0)
    shared = [rng.integers(0, 150_000, PROMPT - 1) for _ in range(min(clients, DISTINCT))]
    prompts = [np.append(shared[i % len(shared)], i) for i in range(clients)]
    times: list[float] = []
    each = max(1, requests // 2 // clients)
    async with open_cache(config(clients=clients)) as cache:
        for prompt in prompts:
            await serve(cache, prompt)
        for _ in range(ROUNDS):
            began = time.thread_time()
            await throughput(cache, prompts, each)
            times.append((time.thread_time() - began) / (each * clients) * 1e6)
    took, name = median(times), f"processor time, {clients} clients"
    return time_row(name, took, CROWD_US, "us", "the bar")
