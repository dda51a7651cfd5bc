"""Replay of a request trace: real blocks move, and every one that is loaded is verified."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from kvactors.cache import open_cache
from kvactors.errors import ConfigError, KVActorsError, NoRoom
from kvactors.observe.lag import LagMonitor
from kvactors.scenario.engine import Engine, beside, reporting
from kvactors.scenario.output import in_unicode
from kvactors.scenario.recorder import Observe
from kvactors.scenario.report import Progress, Report, Totals, make_report
from kvactors.scenario.serving import (
    Baseline,
    Pace,
    Serving,
    ServingFigures,
    ThreadModel,
    serve_on_model,
    sizes_of,
)
from kvactors.scenario.spec import Positive
from kvactors.scenario.sweep import lru_rates
from kvactors.scenario.trace import TraceRequest, read_trace, tokens_of
from kvactors.settings import Config
from kvactors.settings.check import Count, Number
from kvactors.threads import in_thread


class ReplaySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a replay.

    Attributes:
        mode: sequential (a request ends, and everything it caused, before the next begins) or
            timed (arrivals by their time stamps).
        speed: factor on the trace's clock.
        prefill_tokens_per_s: tokens of prompts that the model computes in a second, in timed mode.
        decode_tokens_per_s: decode steps in a second. Each running request gets a token a step.
        step_tokens: tokens of prompts computed in one step at most (chunked prefill).
        most_running: requests with device blocks at most.
        patience: seconds after which the earliest request that waits for blocks is given up.
        baselines: caches that the same requests are served on, as models, for comparison: none
            (every prompt is computed) and lru (an exact LRU of the same sizes whose loads take no
            time).
    """

    mode: Literal["sequential", "timed"] = "sequential"
    coarse: Count = 1
    limit: Number = 0
    speed: Positive = 1.0
    prefill_tokens_per_s: Positive = 50_000.0
    decode_tokens_per_s: Positive = 50.0
    step_tokens: Count = 8192
    most_running: Count = 256
    patience: Positive = 120.0
    baselines: tuple[Baseline, ...] = ("none", "lru")


class ReplayConfig(Config, frozen=True, forbid_unknown_fields=True):
    """A cache's config and a `[replay]` table."""

    replay: ReplaySettings = ReplaySettings()

    @classmethod
    def from_mapping(cls, data: Any) -> ReplayConfig:
        """Check a mapping. Raises ConfigError with the reason."""
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
                        served = await Serving(
                            engine,
                            arrivals,
                            pace_of(settings),
                            speed=settings.speed,
                            most_running=settings.most_running,
                            patience=settings.patience,
                        ).run()
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
            return {"cache": served.as_dict()} | serve_baselines(arrivals, settings, used)

        report.serving = await in_thread(all_figures, "kvactors-baselines")
    return report


class TraceClock:
    """The time stamp of the request that is being served, in seconds."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        """The time."""
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


def pace_of(settings: ReplaySettings) -> Pace:
    """The model's step times."""
    return Pace(
        settings.prefill_tokens_per_s, 1.0 / settings.decode_tokens_per_s, settings.step_tokens
    )


def serve_baselines(
    requests: Sequence[TraceRequest], settings: ReplaySettings, config: Config
) -> dict[str, dict[str, Any]]:
    """The figures of a serving loop on each baseline."""
    pace, most = pace_of(settings), settings.most_running
    return {
        name: serve_on_model(requests, sizes_of(config, name), pace, most).as_dict()
        for name in settings.baselines
    }
