"""Runs a scenario, on the real clock or on a loop of virtual time."""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from msgspec.structs import replace

from kvactors.cache import KVCache, open_cache
from kvactors.errors import ConfigError, KVActorsError
from kvactors.flush_notifier.sinks import make_sinks
from kvactors.flush_notifier.sinks.jsonl import replay_jsonl
from kvactors.flush_notifier.sinks.kv_wire import MEDIA
from kvactors.layout import make_layout
from kvactors.observe.lag import NO_LAGS, LagMonitor
from kvactors.observe.statistics import announceable
from kvactors.scenario.child import Child, child, compare, log_errors_only, routing, say
from kvactors.scenario.engine import Engine, Observe, beside, reporting
from kvactors.scenario.replay import cache_config
from kvactors.scenario.report import Progress, Report, Totals, make_report
from kvactors.scenario.spec import FaultSpec, Pool, Scenario, Workload, events_of
from kvactors.scenario.workload import Script, chat, random_tokens
from kvactors.settings import Config, StorageConfig
from kvactors.settings.sinks import AttentionStoreConfig, JsonLinesSinkConfig, MemorySinkConfig
from kvactors.settings.tables import QuotaConfig
from kvactors.signals import run_terminable
from kvactors.storage.backend import Backend
from kvactors.storage.factory import make_backend
from kvactors.storage.inspect import keys_in
from kvactors.testing.faults import FaultyBackend, FaultySink, StoreFaults
from kvactors.types import Tier

# -- one run on an open cache, with its faults


RESYNC = 60.0
"""Seconds in which a sink whose index lost its state must have been sent everything again."""


class Session:
    """An open cache and the scenario that runs on it. sinks: by name, each able to misbehave."""

    def __init__(
        self, scenario: Scenario, cache: KVCache, sinks: Mapping[str, FaultySink], *, virtual: bool
    ) -> None:
        self.scenario = scenario
        self.cache = cache
        self.sinks = sinks
        self.totals = Totals()
        # sinks whose index lost its state, and how often each had been sent everything by then
        self._lost: dict[str, int] = {}
        self.virtual = virtual
        dead = {
            fault.sink
            for fault in scenario.fault
            if fault.sink and fault.lasting and fault.kind in ("down", "hang")
        }
        self.living = None if not dead else [name for name in cache.sinks if name not in dead]

    async def run(
        self,
        seed: int,
        progress: Progress,
        requests: Callable[[Engine], Awaitable[None]] | None = None,
    ) -> Report:
        """Run workload and faults, wait until the cache is idle, and make the report. requests: in
        place of the scenario's workload."""
        work = self.scenario.workload
        engine = Engine(self.cache, self.totals, thorough=requests is not None)
        monitor = LagMonitor()
        began = time.monotonic()
        async with (
            reporting(self.totals, progress),
            beside(*(self._fault(fault) for fault in self.scenario.fault if not fault.turn)),
            monitor.running(),
        ):
            if requests is not None:
                await requests(engine)
            elif work.kind == "chat":
                await chat(engine, work, seed, self._before_turn)
            else:
                await Script(engine, seed).run(work.step)
            await engine.settle(self.living)
            if self._lost:
                await self._resynced()
                await engine.settle(self.living)
        lags = NO_LAGS if self.virtual else monitor.results()
        name = self.scenario.scenario.name
        return make_report(
            name, self.totals, self.cache, lags, time.monotonic() - began, self.living
        )

    async def _fault(self, spec: FaultSpec) -> None:
        await anyio.sleep(spec.at)
        await self._begin(spec)
        if spec.seconds:
            await anyio.sleep(spec.seconds)
            await self._target(spec).recover(spec.fault)

    async def _before_turn(self, turn: int) -> None:
        for spec in self.scenario.fault:
            if spec.turn and spec.turns and turn == spec.turn + spec.turns:
                await self._target(spec).recover(spec.fault)
        for spec in self.scenario.fault:
            if spec.turn and turn == spec.turn:
                await self._begin(spec)

    def _target(self, spec: FaultSpec) -> FaultySink | StoreFaults:
        if spec.sink:
            return self.sinks[spec.sink]
        backend: Any = self.cache.system.backend
        if not isinstance(backend, FaultyBackend):
            raise TypeError(f"no faults can be injected into {backend!r}")
        return backend

    async def _begin(self, spec: FaultSpec) -> None:
        if spec.kind == "loses_state":
            self._lost[spec.sink] = self._resyncs(spec.sink)
        target = self._target(spec)
        await target.inject(spec.fault)
        if isinstance(target, StoreFaults):
            self.totals.rotten = target.flipped

    async def _resynced(self) -> None:
        """Wait until every sink whose index lost its state has been sent everything again: at its
        interval (of two more times one began after the loss), or on request if it has none."""
        waiting = {
            name: count for name, count in self._lost.items() if self.sinks[name].resync_interval
        }
        for name in self._lost.keys() - waiting.keys():
            await self.cache.resync(name, deadline=RESYNC)
        with anyio.fail_after(RESYNC):
            while any(self._resyncs(name) < count + 2 for name, count in waiting.items()):  # noqa: ASYNC110  (counted elsewhere)
                await anyio.sleep(0.01)

    def _resyncs(self, name: str) -> int:
        return next(
            int(sink.resyncs) for sink in self.cache.statistics().flush if sink.name == name
        )

    def named(self) -> dict[Tier, set[bytes]]:
        """The blocks that a sink with every delivery must have."""
        return announceable(self.cache.system)

    def published(self) -> tuple[int, dict[str, set[int]]]:
        """The number of batches of KV events so far, and the hashes that their readers must have by
        medium. Nothing without a sink of KV events."""
        settings = events_of(self.scenario)
        if settings is None:
            return 0, {}
        sink: Any = self.sinks[settings.label].inner
        media = MEDIA[settings.media]
        return sink.events.sequence, {
            media[tier]: {int.from_bytes(key[-8:], "big") for key in keys}
            for tier, keys in self.named().items()
        }


@asynccontextmanager
async def session(
    scenario: Scenario, *, virtual: bool, observe: Observe = nullcontext
) -> AsyncIterator[Session]:
    """A scenario's cache, open, its sinks wrapped so that they can misbehave."""
    config = Config.from_env(base=cache_config(scenario))
    layout = make_layout(config.layout, config.cache.block_size)
    sinks = {sink.name: FaultySink(sink) for sink in make_sinks(config, layout)}
    bare = replace(config, flush=replace(config.flush, sinks=()))
    store = None
    if config.flush.flush_only:
        bare = replace(bare, storage=StorageConfig())
    else:
        identity = (config.cache.model, layout.fingerprint, layout.block_bytes)
        store = make_backend(config.storage, *identity)
    backend = None if store is None else cast("Backend", FaultyBackend(store))
    if bare.storage.backend != "attention_store":  # else only the sinks, already open, use it
        bare = replace(bare, attention_store=AttentionStoreConfig())
    async with (
        open_cache(
            bare, sinks=list(sinks.values()), backend=backend, inline_copies=virtual
        ) as cache,
        observe(cache),
    ):
        yield Session(scenario, cache, sinks, virtual=virtual)


# -- a cache in a separate process that is killed (SIGKILL) and restarted, while a router and files
# receive its events
#
# `python -m kvactors.scenario.runner` is one such process. It reads the scenario as one JSON line,
# prints "started", runs the scenario, prints the report and the contents of its tiers, and stays
# until its input ends.


PATIENCE = 300.0
"""Seconds for a process to run its workload."""


class FinalReport(msgspec.Struct):
    """The output of a process when it is idle. sequence, held: see `Session.published`. names:
    block hashes (hex) by tier."""

    report: Report
    held: dict[str, set[int]]
    names: dict[str, set[str]]
    sequence: int


async def run_processes(scenario: Scenario, data: dict[str, Any], seed: int) -> Report:
    """Run the workload in one process after another, and kill all but the last as `process.kills`
    sets. Compare the router, and files of JSON lines, with the tiers of the last process."""
    orders = {"data": data, "seed": seed}
    events = events_of(scenario) if scenario.router.enabled else None
    async with AsyncExitStack() as stack:
        router = None
        if events is not None:
            topic = events.for_model(scenario.cache.model).topic
            connected = routing(
                scenario.router, events.endpoint, events.replay_endpoint, topic, seed
            )
            router = await stack.enter_async_context(connected)
        missing = 0
        for seconds in scenario.process.kills:
            async with life(orders) as killed:
                await anyio.sleep(seconds)
                await killed.kill()
            missing += missing_of(scenario)
        last = await stack.enter_async_context(life(orders))
        rest = msgspec.json.decode(await last.receive(PATIENCE), type=FinalReport)
        report = rest.report
        report.lives = 1 + len(scenario.process.kills)
        report.storage["missing"] = missing
        if router is not None:
            report.router = await compare(router, rest.sequence, rest.held)
            report.flush["divergence"] += report.router["divergence"]
        for sink in scenario.flush.sinks:
            if isinstance(sink, JsonLinesSinkConfig):
                report.flush["divergence"] += divergence_of(sink, rest.names)
        return report


@asynccontextmanager
async def life(orders: dict[str, Any]) -> AsyncIterator[Child]:
    """A process of the scenario that has started."""
    async with child("-m", "kvactors.scenario.runner") as process:
        await process.send_json(orders)
        await process.receive()
        yield process


def missing_of(scenario: Scenario) -> int:
    """Blocks that a file of JSON lines lists in the file store, and that are not in it. Only for
    stores without a limit, whose blocks are never evicted."""
    files = [
        s
        for s in scenario.flush.sinks
        if isinstance(s, JsonLinesSinkConfig)
        and "storage" in s.tiers
        and s.granularity == "per_tier"
    ]
    if scenario.storage.backend != "file" or scenario.storage.capacity_blocks or not files:
        return 0
    held = keys_in(scenario.storage.directory)
    return sum(len(replay_jsonl(Path(s.path))[Tier.STORAGE] - held) for s in files)


def divergence_of(sink: JsonLinesSinkConfig, names: dict[str, set[str]]) -> int:
    """Blocks on which a file of JSON lines and the tiers differ."""
    view = {
        tier: {key.hex() for key in keys} for tier, keys in replay_jsonl(Path(sink.path)).items()
    }
    tiers = [Tier[tier.upper()] for tier in sink.tiers]
    if sink.granularity == "node":
        truth = set[str]().union(*(names[str(tier.name)] for tier in tiers))
        return len(set[str]().union(*view.values()) ^ truth)
    return sum(len(view[tier] ^ names[str(tier.name)]) for tier in tiers)


async def live() -> None:
    """Run one process of the scenario: the code of `python -m kvactors.scenario.runner`."""
    orders = msgspec.json.decode(await anyio.to_thread.run_sync(sys.stdin.readline))
    async with session(Scenario.from_mapping(orders["data"]), virtual=False) as one:
        print("started", flush=True)
        report = await one.run(orders["seed"], lambda _: None)
        sequence, held = one.published()
        names = {str(tier.name): {key.hex() for key in keys} for tier, keys in one.named().items()}
        say(FinalReport(report, held, names, sequence))
        await anyio.to_thread.run_sync(sys.stdin.readline)


# -- the scenario of a file


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
    """Run the scenario of a file. observe: entered with the open cache of the run that counts. Not
    called if the run has several processes."""
    with tempfile.TemporaryDirectory(prefix="kvactors-") as folder:
        data = with_temporary(data, folder)
        scenario = Scenario.from_mapping(data)
        if seed is None:
            seed = scenario.scenario.seed
        if seed < 0:
            raise ConfigError(f"a seed is 0 or more, not {seed}")
        if scenario.workload.kind == "tenants":
            check_tenants(scenario)
        run = partial(run_session, scenario, seed, progress, virtual=virtual, observe=observe)
        if virtual:
            from kvactors.testing.loop import simulate

            check_virtual(scenario)
            return scenario, simulate(run, seed)
        if scenario.process.kills:
            return scenario, run_terminable(run_processes(scenario, data, seed))
        return scenario, run_terminable(run())


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
            mooncake = replace(
                scenario.storage.mooncake, master_server_address=address, local_hostname="127.0.0.1"
            )
            scenario = replace(scenario, storage=replace(scenario.storage, mooncake=mooncake))
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

    master = Master()

    async def outage() -> None:
        await anyio.sleep(settings.down_at)
        await anyio.to_thread.run_sync(master.kill)
        await anyio.sleep(settings.down_for)
        await anyio.to_thread.run_sync(master.start)

    await anyio.to_thread.run_sync(master.start)
    try:
        async with beside(*([outage()] if settings.down_at else [])):
            yield master.address
    finally:
        master.kill()


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


async def contend(
    engine: Engine, work: Workload, seed: int, flood: int, rates: dict[str, float]
) -> None:
    """Serve rounds of the quiet tenant's prompts, and after each of its requests `flood` unique
    prompts of the noisy tenant. Each of those is requested TIMES times, so that it looks worth
    keeping. rates: gets the share of the blocks looked up that each tenant hits after the first
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
    for salt, blocks in looked_up.items():
        rates[salt] = round(found[salt] / max(1, blocks), 6)


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
    for policy, case in product(POLICIES, CASES):
        async with session(case_of(scenario, policy, case), virtual=virtual) as one:
            one.totals = totals
            flood = 0 if case == "alone" else scenario.workload.flood
            rates = tenants[f"{policy}_{case}"] = {}
            work = partial(contend, work=scenario.workload, seed=seed, flood=flood, rates=rates)
            report = await one.run(seed, progress, work)
        for name in ("pending", "divergence"):
            if report.flush[name]:
                totals.complain(f"{policy}, {case}: flush.{name} is {report.flush[name]}")
        totals.errors += [one for one in report.errors if one not in totals.errors]
    report.errors, report.tenants = totals.errors, tenants
    return report


if __name__ == "__main__":
    log_errors_only()
    asyncio.run(live())
