"""Runs a scenario, on the real clock or on a loop of virtual time."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio

from kvactors.cache import open_cache
from kvactors.errors import ConfigError
from kvactors.observe.lag import Lag, LagMonitor
from kvactors.scenario.engine import Engine
from kvactors.scenario.replay import cache_config
from kvactors.scenario.report import Report, Totals, make_report
from kvactors.scenario.spec import Scenario
from kvactors.scenario.workload import Script, chat
from kvactors.testing.loop import simulate

Progress = Callable[[Totals], None]
TEMP = "@temp"
"""Stands for a fresh folder, removed after the run, in storage.directory and sink paths."""


def run_scenario(
    data: dict[str, Any], *, seed: int | None = None, virtual: bool = False, progress: Progress = lambda _: None
) -> tuple[Scenario, Report]:
    """Run what a scenario file says. Raises ConfigError for anything in it that cannot be."""
    with tempfile.TemporaryDirectory(prefix="kvactors-") as folder:
        scenario = Scenario.from_mapping(with_temporary(data, folder))
        if seed is None:
            seed = scenario.scenario.seed
        if not virtual:
            return scenario, asyncio.run(_run(scenario, seed, progress, virtual=False))
        if scenario.storage.backend == "file" or any(sink.kind != "memory" for sink in scenario.flush.sinks):
            raise ConfigError(
                "a run in virtual time has no threads: storage.backend = 'file' and sinks of other kinds than memory need them"
            )
        return scenario, simulate(lambda: _run(scenario, seed, progress, virtual=True), seed)


async def _run(scenario: Scenario, seed: int, progress: Progress, *, virtual: bool) -> Report:
    totals, work = Totals(), scenario.workload
    async with open_cache(cache_config(scenario), inline_copies=virtual) as cache:
        began, engine, monitor = time.monotonic(), Engine(cache, totals), LagMonitor()
        with reporting(totals, progress):
            async with monitor.running():
                if work.kind == "chat":
                    await chat(engine, work, seed)
                else:
                    await Script(engine, seed).run(work.step)
                await engine.settle()
        lag = Lag(0.0, 0.0, 0.0) if virtual else monitor.result()
        return make_report(scenario.scenario.name, totals, cache, lag, time.monotonic() - began)


@contextmanager
def reporting(totals: Totals, progress: Progress) -> Iterator[None]:
    """Report progress a few times a second while the block runs."""

    async def report() -> None:
        while True:
            progress(totals)
            await anyio.sleep(0.1)

    task = asyncio.get_running_loop().create_task(report())
    try:
        yield
    finally:
        task.cancel()
        progress(totals)


def with_temporary(data: dict[str, Any], folder: str) -> dict[str, Any]:
    """The mapping with `@temp` replaced by a folder, wherever a path may stand."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        if isinstance(value, str) and (value == TEMP or value.startswith(TEMP + "/")):
            return folder + value[len(TEMP) :]
        return value

    result = replaced(data)
    assert isinstance(result, dict)
    return result
