"""Replay of a request trace: real blocks move, and every one that is loaded is verified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import anyio
import msgspec

from kvactors.cache import open_cache
from kvactors.config import Config, convert
from kvactors.errors import ConfigError, KVActorsError, NoRoom
from kvactors.observe.lag import LagMonitor
from kvactors.scenario.engine import Engine
from kvactors.scenario.observe import Observe, unobserved
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
    trace: str | Path,
    config: ReplayConfig,
    progress: Progress = lambda _: None,
    observe: Observe = unobserved,
) -> Report:
    """Replay a trace.

    Args:
        trace: the file.
        config: of the cache and the replay.
        progress: called with the totals after each request.
        observe: entered with the open cache.

    Raises:
        ConfigError: the trace cannot be read.
    """
    settings, totals = config.replay, Totals()
    requests = read_trace(trace, coarse=settings.coarse, limit=settings.limit)
    async with (
        open_cache(cache_config(config)) as cache,
        LagMonitor().running() as lag,
        observe(cache),
    ):
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
            work = partial(
                engine.serve_patiently,
                str(number),
                tokens_of(request.ids, engine.cache.block_size),
                retry=settings.retry,
                patience=settings.patience,
                tokens_per_s=settings.prefill_tokens_per_s * settings.speed,
                think=request.output_length / settings.decode_tokens_per_s / settings.speed,
            )
            tasks.start_soon(work)
            progress(engine.totals)
    progress(engine.totals)
