"""Runs a scenario, on the real clock or on a loop of virtual time."""

from __future__ import annotations

import asyncio
import re
import tempfile
from typing import Any

from kvactors.errors import ConfigError, KVActorsError
from kvactors.scenario.lives import run_lives
from kvactors.scenario.report import Report
from kvactors.scenario.router import compare, routing
from kvactors.scenario.session import Progress, Session, session
from kvactors.scenario.spec import Scenario, events_of
from kvactors.sink_config import MemorySinkConfig
from kvactors.testing.loop import simulate

TEMP = "@temp"
"""Stands for a fresh folder, removed after the run, in paths and endpoints."""


def run_scenario(
    data: dict[str, Any], *, seed: int | None = None, virtual: bool = False, progress: Progress = lambda _: None
) -> tuple[Scenario, Report]:
    """Run what a scenario file says. Raises ConfigError for anything in it that cannot be."""
    with tempfile.TemporaryDirectory(prefix="kvactors-") as folder:
        data = with_temporary(data, folder)
        scenario = Scenario.from_mapping(data)
        if seed is None:
            seed = scenario.scenario.seed
        if virtual:
            check_virtual(scenario)
            return scenario, simulate(lambda: run_session(scenario, seed, progress, virtual=True), seed)
        if scenario.lives.kills:
            return scenario, asyncio.run(run_lives(scenario, data, seed))
        return scenario, asyncio.run(run_session(scenario, seed, progress, virtual=False))


def check_virtual(scenario: Scenario) -> None:
    """ConfigError for what needs threads, sockets or processes: a loop of virtual time has none."""
    if scenario.storage.backend == "file" or any(not isinstance(sink, MemorySinkConfig) for sink in scenario.flush.sinks):
        raise ConfigError(
            "a run in virtual time has no threads: storage.backend = 'file' and sinks other than memory need them"
        )
    if scenario.router.enabled or scenario.lives.kills:
        raise ConfigError("a run in virtual time has no processes: router and lives need them")


async def run_session(scenario: Scenario, seed: int, progress: Progress, *, virtual: bool) -> Report:
    """Run it in this process, with its router beside it if it has one."""
    async with session(scenario, virtual=virtual) as one:
        if not scenario.router.enabled:
            return await one.run(seed, progress)
        return await run_routed(one, seed, progress)


async def run_routed(one: Session, seed: int, progress: Progress) -> Report:
    """Run it with a router that looks on, and compare the two at rest."""
    from kvactors.flush_notifier.sinks.kv_wire import MEDIA

    settings = events_of(one.scenario)
    assert settings is not None
    sink: Any = one.sinks[settings.label].inner
    async with routing(one.scenario.router, sink.endpoint, sink.replay_endpoint, settings.topic, seed) as router:
        report = await one.run(seed, progress)
        try:
            report.router = await compare(router, sink.sequence, one.held(MEDIA[settings.media]))
            report.flush["divergence"] += report.router["divergence"]
        except KVActorsError as error:
            report.errors.append(f"router: {error}")
        return report


def with_temporary(data: dict[str, Any], folder: str) -> dict[str, Any]:
    """The mapping with `@temp` replaced by a folder, wherever a path may stand."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return re.sub(rf"(^|//){TEMP}(?=/|$)", lambda m: m[1] + folder, value) if isinstance(value, str) else value

    result = replaced(data)
    assert isinstance(result, dict)
    return result
