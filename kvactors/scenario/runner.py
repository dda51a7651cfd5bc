"""Runs a scenario, on the real clock or on a loop of virtual time."""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any, cast

import anyio
from msgspec.structs import replace

from kvactors.cache import KVCache
from kvactors.errors import ConfigError
from kvactors.flush_notifier.sinks import make_sinks
from kvactors.layout import make_layout
from kvactors.observe.lag import LagMonitor
from kvactors.opening import open_cache
from kvactors.scenario.engine import Engine, Observe, beside, reporting
from kvactors.scenario.replay import cache_config
from kvactors.scenario.report import Event, Progress, Report, Totals, cache_figures, make_report
from kvactors.scenario.spec import FaultSpec, Scenario, outcomes
from kvactors.scenario.steps import Script
from kvactors.scenario.workload import chat
from kvactors.settings import Config, StorageConfig
from kvactors.settings.sinks import AttentionStoreConfig, MemorySinkConfig
from kvactors.settings.tables import SHARED
from kvactors.signals import run_terminable
from kvactors.storage.backend import Backend
from kvactors.storage.factory import make_store
from kvactors.testing.faults import FaultyBackend, FaultySink, StoreFaults

# -- one run on an open cache, with its faults


RESYNC = 60.0
"""Seconds in which a sink whose index lost its state must have been sent everything again."""


class Session:
    """An open cache and the scenario that runs on it. sinks: by name, each able to misbehave.
    name: empty if the scenario has one cache. after: the session before, whose events go on."""

    def __init__(
        self,
        name: str,
        scenario: Scenario,
        cache: KVCache,
        sinks: Mapping[str, FaultySink],
        after: Session | None,
        *,
        virtual: bool,
    ) -> None:
        self.name = name
        self.scenario = scenario
        self.cache = cache
        self.sinks = sinks
        self.totals = Totals()
        self.events: list[Event] = after.events if after else []
        self._began: float = after._began if after else asyncio.get_running_loop().time()
        # sinks whose index lost its state, and how often each had been sent everything by then
        self._lost: dict[str, int] = {}
        self.virtual = virtual
        dead = {
            fault.sink
            for fault in scenario.fault
            if fault.sink and fault.lasting and fault.kind in ("down", "hang")
        }
        self.living = None if not dead else [name for name in cache.sinks if name not in dead]

    async def run(self, seed: int, progress: Progress) -> Report:
        """Run workload and faults, wait until the cache is idle, and make the report."""
        work = self.scenario.workload
        engine = Engine(self.cache, self.totals)
        monitor = LagMonitor()
        async with (
            reporting(self.totals, progress),
            beside(*(self._fault(fault) for fault in self.scenario.fault if not fault.turn)),
            monitor.running(),
        ):
            if work.kind == "chat":
                await chat(engine, work, seed, self._before_turn)
            else:
                await Script(engine, seed).run(work.step)
            await engine.settle(self.living)
            if self._lost:
                await self._resynced()
                await engine.settle(self.living)
        # a loop whose time is not real has no lag
        lags = (LagMonitor() if self.virtual else monitor).results()
        name = self.scenario.scenario.name
        return make_report(name, self.totals, self.cache, lags, self.living)

    async def _fault(self, spec: FaultSpec) -> None:
        await anyio.sleep(spec.at)
        await self._begin(spec)
        if spec.seconds:
            await anyio.sleep(spec.seconds)
            await self._end(spec)

    async def _before_turn(self, turn: int) -> None:
        for spec in self.scenario.fault:
            if spec.turn and spec.turns and turn == spec.turn + spec.turns:
                await self._end(spec)
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
        self._note(spec, "")
        await target.inject(spec.fault)
        if isinstance(target, StoreFaults):
            self.totals.rotten = target.flipped

    async def _end(self, spec: FaultSpec) -> None:
        await self._target(spec).recover(spec.fault)
        self._note(spec, " ended")

    def _note(self, spec: FaultSpec, what: str) -> None:
        place = f"sink {spec.sink}" if spec.sink else "storage"
        self.note(f"{place}: {spec.kind}{what}")

    def note(self, what: str) -> None:
        """Add an event, of this cache if there are several."""
        seconds = round(asyncio.get_running_loop().time() - self._began, 3)
        self.events.append(Event(seconds, f"{self.name}: {what}" if self.name else what))

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


@asynccontextmanager
async def session(
    name: str, after: Session | None, observe: Observe, *, scenario: Scenario, virtual: bool
) -> AsyncIterator[Session]:
    """A scenario's cache, open, its sinks wrapped so that they can misbehave."""
    config = Config.from_env(base=cache_config(scenario))
    layout = make_layout(config.layout, config.cache.block_size)
    sinks = {sink.name: FaultySink(sink) for sink in make_sinks(config, layout)}
    bare = replace(config, flush=replace(config.flush, sinks=()))
    store = None
    if config.flush.flush_only:
        bare = replace(bare, storage=StorageConfig())
    elif config.cache.groups:  # each opens its own store
        if any(not fault.sink for fault in scenario.fault):
            raise ConfigError(
                "faults of the store and cache.groups cannot be combined: name a sink, or leave "
                "the groups out"
            )
    else:
        store = make_store(config.storage, config.cache.model, layout)
    backend = None if store is None else cast("Backend", FaultyBackend(store))
    if bare.storage.backend != "attention_store":  # else only the sinks, already open, use it
        bare = replace(bare, attention_store=AttentionStoreConfig())
    async with (
        open_cache(
            bare, sinks=list(sinks.values()), backend=backend, inline_copies=virtual
        ) as cache,
        observe(cache),
    ):
        one = Session(name, scenario, cache, sinks, after, virtual=virtual)
        if name:
            stored = cache.statistics().store
            found = f", {stored.objects:,} blocks in the store" if stored and stored.objects else ""
            one.note(f"opened{found}")
        yield one


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
    record: Observe = nullcontext,
) -> tuple[Scenario, Report]:
    """Run the scenario of a file. observe: entered with the open cache of the run that counts.
    record: entered with each open cache before that one."""
    with tempfile.TemporaryDirectory(prefix="kvactors-") as folder:
        data = with_temporary(data, folder)
        scenario = Scenario.from_mapping(data)
        if seed is None:
            seed = scenario.scenario.seed
        if seed < 0:
            raise ConfigError(f"a seed is 0 or more, not {seed}")
        began = time.monotonic()
        run = partial(run_caches, scenario, seed, progress, observe, record, virtual=virtual)
        if virtual:
            from kvactors.testing.loop import simulate

            check_virtual(scenario)
            report = simulate(run, seed)
        else:
            report = run_terminable(run())
        report.wall_s = round(time.monotonic() - began, 3)
        report.description = scenario.scenario.description
        report.expectations = outcomes(scenario.expect, report)
        return scenario, report


def check_virtual(scenario: Scenario) -> None:
    """Raises ConfigError for parts that need threads: a loop of virtual time has none."""
    if scenario.storage.backend in ("file", *SHARED) or any(
        not isinstance(sink, MemorySinkConfig) for sink in scenario.flush.sinks
    ):
        raise ConfigError(
            f"a run in virtual time has no threads: storage.backend = {scenario.storage.backend!r} "
            "or a sink other than memory needs them"
        )


async def run_caches(
    scenario: Scenario,
    seed: int,
    progress: Progress,
    observe: Observe,
    record: Observe,
    *,
    virtual: bool,
) -> Report:
    """Run the scenario, after its `process.restarts` earlier runs, on `process.engines` caches.
    Wrong blocks and errors of all caches count."""
    restarts, engines = scenario.process.restarts, scenario.process.engines
    opened = partial(session, scenario=scenario, virtual=virtual)
    reports, one = dict[str, Report](), None
    for number in range(1, restarts + 1):
        async with opened(f"run {number}", one, record) as one:
            reports[one.name] = await one.run(seed, progress)
    async with AsyncExitStack() as stack:
        running = list[Session]()
        for number in range(1, engines + 1):
            last = number == engines
            name = f"engine {number}" if engines > 1 else f"run {restarts + 1}" if restarts else ""
            opening = opened(name, one, observe if last else record)
            one = await stack.enter_async_context(opening)
            running.append(one)
            if not last:
                await one.run(seed, progress)
        ended = await asyncio.gather(*(each.run(seed, progress) for each in running))
        reports |= zip((each.name for each in running), ended, strict=True)
    *others, report = reports.values()
    for other in others:
        report.corrupt_blocks_served += other.corrupt_blocks_served
        report.errors += other.errors
    report.events = running[0].events
    if others:
        report.caches = {name: cache_figures(each) for name, each in reports.items()}
    return report


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
