"""Runs a scenario, on the real clock or on a loop of virtual time."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from kvactors.errors import ConfigError, KVActorsError
from kvactors.scenario.child import compare, routing
from kvactors.scenario.fleet import run_fleet
from kvactors.scenario.processes import run_processes
from kvactors.scenario.report import Report
from kvactors.scenario.session import Progress, Session, beside, session
from kvactors.scenario.spec import Pool, Scenario, events_of
from kvactors.scenario.tenants import check_tenants, run_tenants
from kvactors.scenario.watching import Observe, unobserved
from kvactors.signals import run_terminable, temporary_folder
from kvactors.sink_config import MemorySinkConfig

TEMP = "@temp"
"""Stands for a fresh folder, removed after the run, in paths and endpoints."""


def run_scenario(
    data: dict[str, Any],
    *,
    seed: int | None = None,
    virtual: bool = False,
    progress: Progress = lambda _: None,
    observe: Observe = unobserved,
) -> tuple[Scenario, Report]:
    """Run the scenario of a file.

    Args:
        data: the file's mapping.
        seed: in place of the scenario's.
        virtual: whether it runs on a loop of virtual time.
        progress: called with the totals a few times a second.
        observe: entered with the open cache of the run that counts. Not called if the run has
            several processes.

    Raises:
        ConfigError: a setting of the scenario is invalid.
    """
    with temporary_folder() as folder:
        data = with_temporary(data, folder)
        scenario = Scenario.from_mapping(data)
        if seed is None:
            seed = scenario.scenario.seed
        if seed < 0:
            raise ConfigError(f"a seed is 0 or more, not {seed}")
        if scenario.workload.kind == "tenants":
            check_tenants(scenario)
        if virtual:
            from kvactors.testing.loop import simulate

            check_virtual(scenario)
            return scenario, simulate(
                lambda: run_session(scenario, seed, progress, virtual=True, observe=observe), seed
            )
        if scenario.fleet.nodes:
            return scenario, run_terminable(run_fleet(data, seed, progress))
        if scenario.process.kills:
            return scenario, run_terminable(run_processes(scenario, data, seed))
        return scenario, run_terminable(
            run_session(scenario, seed, progress, virtual=False, observe=observe)
        )


def check_virtual(scenario: Scenario) -> None:
    """Raises ConfigError for parts that need threads, sockets or processes: a loop of virtual time
    has none."""
    if scenario.storage.backend == "file" or any(
        not isinstance(sink, MemorySinkConfig) for sink in scenario.flush.sinks
    ):
        raise ConfigError(
            "a run in virtual time has no threads: storage.backend = 'file' and sinks other than "
            "memory need them"
        )
    if scenario.router.enabled or scenario.process.kills or scenario.storage.backend == "mooncake":
        raise ConfigError(
            "a run in virtual time has no processes: router, [process] and mooncake need them"
        )


async def run_session(
    scenario: Scenario, seed: int, progress: Progress, *, virtual: bool, observe: Observe
) -> Report:
    """Run the scenario in this process, after its `process.restarts` earlier runs, with the
    processes beside it: a router, a pool's master and another node."""
    if scenario.workload.kind == "tenants":
        return await run_tenants(scenario, seed, progress, virtual=virtual)
    if scenario.mooncake.enabled:
        async with pool(scenario.mooncake) as address:
            return await run_in_pool(with_master(scenario, address), seed, progress, observe)
    for _ in range(scenario.process.restarts):
        async with session(scenario, virtual=virtual) as one:
            await one.run(seed, progress)
    return await run_once(scenario, seed, progress, virtual=virtual, observe=observe)


async def run_in_pool(
    scenario: Scenario, seed: int, progress: Progress, observe: Observe
) -> Report:
    """With another node of the pool that has run the workload already, if there is to be one."""
    if not scenario.mooncake.first_node:
        return await run_once(scenario, seed, progress, virtual=False, observe=observe)
    async with session(scenario, virtual=False) as first:
        before = await first.run(seed, progress)
        report = await run_once(scenario, seed, progress, virtual=False, observe=observe)
        report.errors += before.errors
        return report


async def run_once(
    scenario: Scenario, seed: int, progress: Progress, *, virtual: bool, observe: Observe
) -> Report:
    """The run that counts."""
    async with session(scenario, virtual=virtual, observe=observe) as one:
        if not scenario.router.enabled:
            return await one.run(seed, progress)
        return await run_routed(one, seed, progress)


async def run_routed(one: Session, seed: int, progress: Progress) -> Report:
    """Run it with a router that looks on, and compare the two at rest."""
    from kvactors.flush_notifier.sinks.kv_wire import MEDIA

    settings = events_of(one.scenario)
    assert settings is not None
    sink: Any = one.sinks[settings.label].inner
    async with routing(
        one.scenario.router, sink.endpoint, sink.replay_endpoint, sink.config.topic, seed
    ) as router:
        report = await one.run(seed, progress)
        try:
            report.router = await compare(
                router, sink.events.sequence, one.held(MEDIA[settings.media])
            )
            report.flush["divergence"] += report.router["divergence"]
        except KVActorsError as error:
            report.errors.append(f"router: {error}")
        return report


@asynccontextmanager
async def pool(settings: Pool) -> AsyncIterator[str]:
    """Run a Mooncake master and give its address. The master is killed and started again as the
    settings ask."""
    from kvactors.scenario.mooncake_master import Master
    from kvactors.testing.faults import Fault
    from kvactors.testing.plan import carry_out

    master = Master()

    async def outage() -> None:
        await anyio.sleep(settings.down_at)
        await carry_out(master, Fault("store_down", duration=settings.down_for))

    await anyio.to_thread.run_sync(master.start)
    try:
        async with beside(*([outage()] if settings.down_at else [])):
            yield master.address
    finally:
        master.kill()


def with_master(scenario: Scenario, address: str) -> Scenario:
    """The scenario with its pool's master, and small shares of memory."""
    replace = msgspec.structs.replace
    mooncake = replace(
        scenario.storage.mooncake, master_server_address=address, local_hostname="127.0.0.1"
    )
    return replace(scenario, storage=replace(scenario.storage, mooncake=mooncake))


def with_temporary(data: dict[str, Any], folder: str) -> dict[str, Any]:
    """The mapping with `@temp` replaced by a folder, wherever a path may stand."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: replaced(item) for key, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return (
            re.sub(rf"(^|//){TEMP}(?=/|$)", lambda m: m[1] + folder, value)
            if isinstance(value, str)
            else value
        )

    result = replaced(data)
    assert isinstance(result, dict)
    return result
