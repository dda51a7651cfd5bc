"""Replay of a request trace: real blocks move, and every one that is loaded is verified."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvactors.cache import open_cache
from kvactors.errors import ConfigError, KVActorsError, NoRoom
from kvactors.observe.lag import LagMonitor
from kvactors.scenario.engine import Engine, Observe, beside, reporting
from kvactors.scenario.output import in_unicode
from kvactors.scenario.report import Progress, Report, Totals, make_report
from kvactors.scenario.serving import (
    ReplaySettings,
    Serving,
    ServingFigures,
    ThreadModel,
    serve_on_model,
)
from kvactors.scenario.sweep import lru_rates
from kvactors.scenario.trace import TraceRequest, read_trace, tokens_of
from kvactors.settings import Config
from kvactors.threads import in_thread


class ReplayConfig(Config, frozen=True, forbid_unknown_fields=True):
    """A cache's config and a `[replay]` table."""

    replay: ReplaySettings = ReplaySettings()

    @classmethod
    def from_mapping(cls, data: Any) -> ReplayConfig:
        config = super().from_mapping(data)
        if not config.device.num_blocks:
            raise ConfigError("device.num_blocks must be at least 1: a replay sets it nowhere else")
        return config


def cache_config(config: Config) -> Config:
    """The cache's part of a larger config."""
    return Config(**{name: getattr(config, name) for name in Config.__struct_fields__})


async def replay(
    trace: str | Path,
    config: ReplayConfig,
    progress: Progress = lambda _: None,
    observe: Observe = nullcontext,
) -> Report:
    """Replay a trace."""
    settings, totals, served = config.replay, Totals(), ServingFigures()
    read = partial(read_trace, trace, coarse=settings.coarse, limit=settings.limit)
    timed = settings.mode == "timed"
    arrivals = await in_thread(lambda: list(read()), "kvactors-trace") if timed else []
    clock = TraceClock()
    async with open_cache(cache_config(config), clock=None if timed else clock) as cache:
        engine = Engine(cache, totals, ThreadModel(cache.device) if timed else None)
        with uncollected() if timed else nullcontext():
            async with LagMonitor().running() as lag, observe(cache):
                began = time.monotonic()
                if timed:
                    async with beside(reporting(totals, progress)):
                        served = await Serving(engine, arrivals, settings).run()
                    progress(totals)
                else:
                    await replay_in_order(engine, read(), progress, clock)
                await engine.settle()
                wall = time.monotonic() - began
        report = make_report(in_unicode(Path(trace).name), totals, cache, lag.results(), wall)
        used = cache.config
    if not timed:
        report.hit_rate_lru = await in_thread(lambda: lru_rates(read(), used), "kvactors-lru")
    else:

        def all_figures() -> dict[str, dict[str, Any]]:
            models = {
                name: serve_on_model(arrivals, used, name, settings) for name in settings.baselines
            }
            return {name: one.as_dict() for name, one in ({"cache": served} | models).items()}

        report.serving = await in_thread(all_figures, "kvactors-baselines")
    return report


class TraceClock:
    """The time stamp of the request that is being served, in seconds."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at


async def replay_in_order(
    engine: Engine, requests: Iterable[TraceRequest], progress: Progress, clock: TraceClock
) -> None:
    """One request after another, each with everything it caused. clock: of the cache."""
    cache = engine.cache
    for number, request in enumerate(requests):
        clock.at = request.timestamp
        tokens = tokens_of(request.ids, cache.block_size)
        rest = request.input_length - len(tokens)
        if 0 < rest < cache.block_size:  # a prompt that ends in a block can be cached as a whole
            tokens = np.append(tokens, np.zeros(rest, np.uint32))
        try:
            await engine.serve(str(number), tokens, output_tokens=request.output_length)
            await cache.wait_idle()
        except NoRoom:
            engine.totals.rejected += 1
        except KVActorsError as error:
            engine.failed(str(number), error)
        progress(engine.totals)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's cyclic garbage collector, whose passes over a large cache's objects stop the
    loop for hundreds of milliseconds."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
