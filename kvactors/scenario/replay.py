"""Replay of a request trace: real blocks move, and every one that is loaded is verified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec
import numpy as np
from numpy.typing import NDArray

from kvactors.cache import open_cache
from kvactors.config import Config, convert
from kvactors.errors import ConfigError, KVActorsError, NoRoom
from kvactors.lease import Lease
from kvactors.observe.lag import LagMonitor
from kvactors.scenario.engine import Engine
from kvactors.scenario.report import Report, Totals, make_report
from kvactors.scenario.trace import TraceRequest, check_range, read_trace, tokens_of
from kvactors.validation import validate

Progress = Callable[[Totals], None]


class ReplaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a replay.

    Attributes:
        mode: sequential (a request ends, and everything it caused, before the next begins) or
            timed (arrivals by their time stamps).
        coarse, limit: see `read_trace`.
        speed: factor on the trace's clock.
        prefill_tokens_per_s, decode_tokens_per_s: the model's pace, in timed mode.
        retry: seconds between attempts of a request that found too few free blocks.
        patience: seconds after which such a request is given up.
    """

    mode: Literal["sequential", "timed"] = "sequential"
    coarse: int = 1
    limit: int = 0
    speed: float = 1.0
    prefill_tokens_per_s: float = 50_000.0
    decode_tokens_per_s: float = 50.0
    retry: float = 0.05
    patience: float = 120.0


class ReplayConfig(Config, frozen=True, forbid_unknown_fields=True):
    """A cache's config and a `[replay]` table."""

    replay: ReplaySettings = ReplaySettings()

    @classmethod
    def from_mapping(cls, data: Any) -> ReplayConfig:
        """Check a mapping. Raises ConfigError with the reason."""
        config = convert(data, cls)
        validate(config, data)
        for name in ("speed", "prefill_tokens_per_s", "decode_tokens_per_s", "retry", "patience"):
            if not 0 < getattr(config.replay, name) < math.inf:
                raise ConfigError(
                    f"replay.{name} must be positive and finite, not {getattr(config.replay, name)}"
                )
        check_range(config.replay.coarse, config.replay.limit)
        return config


def cache_config(config: Config) -> Config:
    """The cache's part of a larger config."""
    return Config(**{name: getattr(config, name) for name in Config.__struct_fields__})


async def replay(
    trace: str | Path, config: ReplayConfig, progress: Progress = lambda _: None
) -> Report:
    """Replay a trace. Raises ConfigError for a trace that cannot be read."""
    settings, totals = config.replay, Totals()
    requests = read_trace(trace, coarse=settings.coarse, limit=settings.limit)
    async with open_cache(cache_config(config)) as cache, LagMonitor().running() as lag:
        began = time.monotonic()
        engine = Engine(cache, totals)
        if settings.mode == "sequential":
            await replay_in_order(engine, requests, progress)
        else:
            await replay_timed(engine, requests, settings, progress)
        await engine.settle()
        wall = time.monotonic() - began
        return make_report(Path(trace).name, totals, cache, lag.result(), wall)


async def replay_in_order(
    engine: Engine, requests: Iterable[TraceRequest], progress: Progress
) -> None:
    """One request after another, each with everything it caused."""
    cache = engine.cache
    for number, request in enumerate(requests):
        try:
            await engine.serve(str(number), tokens_of(request.ids, cache.block_size))
            await cache.wait_idle()
        except NoRoom:
            engine.totals.rejected += 1
        except KVActorsError as error:
            engine.failed(str(number), error)
        progress(engine.totals)


async def replay_timed(
    engine: Engine, requests: Iterable[TraceRequest], settings: ReplaySettings, progress: Progress
) -> None:
    """Arrivals by the trace's clock, many requests in flight."""
    start: float | None = None
    began = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for number, request in enumerate(requests):
            start = request.timestamp if start is None else start
            due = began + (request.timestamp - start) / settings.speed
            await anyio.sleep(max(0.0, due - anyio.current_time()))
            tasks.start_soon(serve_timed, engine, str(number), request, settings)
            progress(engine.totals)
    progress(engine.totals)


async def serve_timed(
    engine: Engine, name: str, request: TraceRequest, settings: ReplaySettings
) -> None:
    """One request at the model's pace."""
    if len(request.ids) > engine.cache.device.num_blocks:
        engine.totals.rejected += 1
        return
    try:
        lease = await acquire_patiently(
            engine, name, tokens_of(request.ids, engine.cache.block_size), settings
        )
        if lease is not None:
            await compute_timed(engine, lease, request.output_length, settings)
    except KVActorsError as error:
        engine.failed(name, error)


async def acquire_patiently(
    engine: Engine, name: str, tokens: NDArray[np.uint32], settings: ReplaySettings
) -> Lease | None:
    """Acquire, and try again while too few blocks are free. Returns None after
    `settings.patience`."""
    give_up = anyio.current_time() + settings.patience
    while True:
        try:
            return await engine.cache.acquire(name, tokens)
        except NoRoom:
            engine.totals.no_room += 1
        if anyio.current_time() > give_up:
            engine.totals.rejected += 1
            return None
        await anyio.sleep(settings.retry)


async def compute_timed(
    engine: Engine, lease: Lease, output_length: int, settings: ReplaySettings
) -> None:
    """Prefill the missing tokens and decode, at the model's pace."""
    async with lease:
        await engine.begin(lease)
        missing = lease.num_tokens - lease.cached_tokens
        await anyio.sleep(missing / settings.prefill_tokens_per_s / settings.speed)
        engine.compute(lease, lease.cached_tokens)
        await lease.commit(lease.num_tokens)
        await anyio.sleep(output_length / settings.decode_tokens_per_s / settings.speed)
