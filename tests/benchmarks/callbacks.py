"""How long callbacks of an asyncio loop keep it, as processor time: a busy machine does not change
it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kvactors.actor.ref import SWEEP
from kvactors.cache import KVCache
from kvactors.opening import open_cache
from kvactors.settings import Config
from tests.benchmarks.frame import Row, time_row

LIMIT_MS = 2.0
BLOCK = 16
CHECKED_BLOCK = 4


class Longest:
    """The longest callback since `reset`, in milliseconds of processor time."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._began = time.thread_time_ns()

    def reset(self) -> None:
        """Forget the callbacks so far. The present one counts from here."""
        self.ms, self._began = 0.0, time.thread_time_ns()

    def run(self, handle: asyncio.Handle) -> None:
        """Run a callback."""
        self._began = time.thread_time_ns()
        _run(handle)
        self.ms = max(self.ms, (time.thread_time_ns() - self._began) / 1e6)


_run = asyncio.Handle._run


@contextmanager
def longest() -> Iterator[Longest]:
    """Measure every callback of the loops of asyncio, without the cyclic collector."""
    found = Longest()
    gc.collect()
    gc.disable()
    run = found.run
    asyncio.Handle._run = lambda handle: run(handle)  # type: ignore[method-assign, assignment]
    try:
        yield found
    finally:
        asyncio.Handle._run = _run  # type: ignore[method-assign]
        gc.enable()


def config(num_blocks: int, block_size: int, **parts: object) -> Config:
    """A cache whose blocks are tiny: the bytes are of no interest here."""
    return Config.from_mapping(
        {
            "cache": {"block_size": block_size, "default_deadline_s": 300.0},
            "device": {"num_blocks": num_blocks},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8},
            **parts,
        }
    )


async def rows(*, quick: bool) -> list[Row]:
    """The longest callback of each kind of large work."""
    tokens, blocks, waiting = (40_000, 4_000, 200) if quick else (1_000_000, 400_000, 10_000)
    commit, finish = await long_prompt(tokens)
    checked = await check(blocks)
    entered, served = await waiters(waiting)
    cases = {
        f"longest callback, commit of {tokens:,} tokens at block {BLOCK}": commit,
        f"longest callback, end of {tokens:,} tokens at block {BLOCK}": finish,
        f"longest callback, check of {blocks:,} blocks in slices": checked,
        f"longest callback, {waiting:,} requests begin to wait for blocks": entered,
        f"longest callback, {waiting:,} waiting requests are served": served,
    }
    return [time_row(case, ms, LIMIT_MS, "ms CPU", "the bar") for case, ms in cases.items()]


async def long_prompt(tokens: int) -> tuple[float, float]:
    """Commit and end of a request of so many tokens."""
    prompt: NDArray[np.int64] = np.random.default_rng(0).integers(0, 150_000, tokens)
    async with open_cache(config(tokens // BLOCK + 64, BLOCK)) as cache:
        lease = await cache.acquire("long", prompt)
        with longest() as found:
            await asyncio.sleep(0)
            found.reset()
            await lease.commit(tokens)
            await asyncio.sleep(0)
            commit = found.ms
            found.reset()
            await lease.finish()
            await cache.wait_idle()
            await asyncio.sleep(0)
            return commit, found.ms


async def check(blocks: int) -> float:
    """`check_slices` of a device full of blocks, with a sink."""
    sink = {"kind": "memory", "tiers": ["device"]}
    parts = min(20_000, blocks // 4)
    async with open_cache(config(blocks, CHECKED_BLOCK, flush={"sinks": [sink]})) as cache:
        for number in range(blocks // parts):
            first = number * parts * CHECKED_BLOCK
            prompt = np.arange(first, first + parts * CHECKED_BLOCK)
            async with await cache.acquire(str(number), prompt) as lease:
                await lease.commit(lease.num_tokens)
        await cache.wait_flushed(deadline=300.0)
        with longest() as found:
            await asyncio.sleep(0)
            found.reset()
            violated = await cache.check_slices()
            await asyncio.sleep(0)
            if violated:
                raise RuntimeError(f"a check found {violated[0]}")
            return found.ms


async def waiters(count: int) -> tuple[float, float]:
    """Requests that wait for the blocks of one request, and are served when it ends."""
    async with open_cache(config(4, BLOCK)) as cache:
        first = await cache.acquire("first", list(range(4 * BLOCK)))
        with longest() as found:
            await asyncio.sleep(0)
            found.reset()
            tasks = []
            for number in range(count):
                tasks.append(asyncio.create_task(wait(cache, number)))
                if not number % 32:
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
            await cache.wait_idle()
            await asyncio.sleep(2 * SWEEP)
            entered = found.ms
            found.reset()
            await first.finish()
            for task in tasks:
                await task
            return entered, found.ms


async def wait(cache: KVCache, number: int) -> None:
    """One such request."""
    async with await cache.acquire(str(number), [number, 1, 2], wait_for_room=True):
        pass
