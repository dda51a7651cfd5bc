"""Runs a scenario, on the real clock or on a loop of virtual time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
from msgspec.structs import replace

from kvactors.errors import ConfigError, KVActorsError
from kvactors.scenario.child import compare, routing
from kvactors.scenario.engine import Engine, Observe, beside
from kvactors.scenario.fleet import run_fleet
from kvactors.scenario.processes import run_processes
from kvactors.scenario.report import Progress, Report, Totals
from kvactors.scenario.session import Session, session
from kvactors.scenario.spec import Pool, Scenario, Workload, events_of
from kvactors.scenario.workload import random_tokens
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.settings.tables import QuotaConfig
from kvactors.signals import run_terminable, temporary_folder

TEMP = "@temp"
"""Stands for a fresh folder, removed after the run, in paths and endpoints."""


def run_scenario(
    data: dict[str, Any],
    *,
    seed: int | None = None,
    virtual: bool = False,
    progress: Progress = lambda _: None,
    observe: Observe = nullcontext,
) -> tuple[Scenario, Report]:
    """Run the scenario of a file.

    Args:
        observe: entered with the open cache of the run that counts. Not called if the run has
            several processes.
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
    async with AsyncExitStack() as stack:
        errors: list[str] = []
        if scenario.mooncake.enabled:
            address = await stack.enter_async_context(pool(scenario.mooncake))
            scenario = with_master(scenario, address)
            if scenario.mooncake.first_node:
                first = await stack.enter_async_context(session(scenario, virtual=virtual))
                errors = (await first.run(seed, progress)).errors
        for _ in range(scenario.process.restarts):
            async with session(scenario, virtual=virtual) as one:
                await one.run(seed, progress)
        async with session(scenario, virtual=virtual, observe=observe) as one:
            run = run_routed if scenario.router.enabled else Session.run
            report = await run(one, seed, progress)
            report.errors += errors
            return report


async def run_routed(one: Session, seed: int, progress: Progress) -> Report:
    """Run it with a router that looks on, and compare the two at rest."""
    settings = events_of(one.scenario)
    assert settings is not None, "it is checked"
    sink: Any = one.sinks[settings.label].inner
    ends = (sink.endpoint, sink.replay_endpoint, sink.config.topic)
    async with routing(one.scenario.router, *ends, seed) as router:
        report = await one.run(seed, progress)
        try:
            report.router = await compare(router, *one.published())
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
        if isinstance(value, str):
            return re.sub(rf"(^|//){TEMP}(?=/|$)", lambda m: m[1] + folder, value)
        return value

    result: dict[str, Any] = replaced(data)
    return result


# -- tenants: the hits of a quiet one alone, beside a flood, and with a quota of the flood


QUIET, NOISY = "quiet", "noisy"
POLICIES = ("lru", "retain")
CASES = ("alone", "flood", "quota")

TIMES = 3
"""Requests of each prompt of the flood."""


def check_tenants(scenario: Scenario) -> None:
    """Raise ConfigError for a scenario of tenants without what it compares."""
    others = (scenario.fault, scenario.router.enabled, scenario.mooncake.enabled)
    if any(others) or scenario.process.restarts:
        raise ConfigError(
            "workload.kind = 'tenants' opens a cache for each case: it has no fault, router, "
            "mooncake or process.restarts"
        )
    quota = scenario.quota.salts.get(NOISY)
    if quota is None or not isinstance(quota.device, int):
        raise ConfigError(f"workload.kind = 'tenants' needs quota.salts.{NOISY}.device in blocks")
    if not 0 < quota.device < scenario.device.num_blocks:
        raise ConfigError(f"quota.salts.{NOISY}.device must be less than device.num_blocks")
    if scenario.workload.flood < 1:
        raise ConfigError("workload.kind = 'tenants' needs workload.flood")


async def contend(engine: Engine, work: Workload, seed: int, *, flood: int) -> dict[str, float]:
    """Serve rounds of the quiet tenant's prompts, and after each of its requests `flood` unique
    prompts of the noisy tenant. Each of those is requested TIMES times, so that it looks worth
    keeping. Returns the share of the blocks looked up that each tenant hits after the first
    round."""
    rng = np.random.default_rng(seed)
    prompts = [random_tokens(rng, work.user_tokens) for _ in range(work.sessions)]
    looked_up, found = Counter({QUIET: 0, NOISY: 0}), Counter[str]()

    async def serve(salt: str, name: str, tokens: Any, *, counts: bool) -> None:
        lease = await engine.serve(name, tokens, salt=salt)
        if counts:
            looked_up[salt] += lease.num_tokens // engine.cache.block_size
            found[salt] += sum(lease.hits)

    for turn in range(work.turns):
        for number, prompt in enumerate(prompts):
            await serve(QUIET, f"{QUIET}-{number}.{turn}", prompt, counts=turn > 0)
            for one in range(flood):
                unique = random_tokens(rng, work.user_tokens)
                for again in range(TIMES):
                    name = f"{NOISY}-{turn}.{number}.{one}.{again}"
                    await serve(NOISY, name, unique, counts=turn > 0)
    return {salt: round(found[salt] / max(1, blocks), 6) for salt, blocks in looked_up.items()}


def case_of(scenario: Scenario, policy: Any, case: str) -> Scenario:
    """The scenario of one case: the quiet tenant alone in the device less the quota, in the flood,
    or in the flood with the quota."""
    device = replace(scenario.device, policy=policy)
    if case == "alone":
        quota = scenario.quota.salts[NOISY].device
        assert isinstance(quota, int)
        device = replace(device, num_blocks=device.num_blocks - quota)
    quotas = scenario.quota if case == "quota" else QuotaConfig()
    return replace(scenario, device=device, quota=quotas)


async def run_tenants(
    scenario: Scenario, seed: int, progress: Progress, *, virtual: bool
) -> Report:
    """Run every case on a fresh cache. The report is of the last one, with the counts of all."""
    totals, tenants = Totals(), dict[str, dict[str, float]]()
    cases = [(policy, case) for policy in POLICIES for case in CASES]
    for policy, case in cases:
        async with session(case_of(scenario, policy, case), virtual=virtual) as one:
            one.totals = totals
            flood = 0 if case == "alone" else scenario.workload.flood
            rates: dict[str, float] = {}

            async def work(
                engine: Engine, rates: dict[str, float] = rates, flood: int = flood
            ) -> None:
                rates |= await contend(engine, scenario.workload, seed, flood=flood)

            report = await one.run(seed, progress, work)
        for name in ("pending", "divergence"):
            if report.flush[name]:
                totals.complain(f"{policy}, {case}: flush.{name} is {report.flush[name]}")
        totals.errors += [one for one in report.errors if one not in totals.errors]
        tenants[f"{policy}_{case}"] = rates
    report.errors, report.tenants = totals.errors, tenants
    return report
