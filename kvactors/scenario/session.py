"""One run of a scenario's workload on an open cache, with its faults."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import anyio
from msgspec.structs import replace

from kvactors.cache import KVCache, open_cache
from kvactors.flush_notifier.sinks import make_sinks
from kvactors.flush_notifier.sinks.kv_wire import MEDIA
from kvactors.layout import make_layout
from kvactors.observe.lag import NO_LAGS, LagMonitor
from kvactors.observe.statistics import announceable
from kvactors.scenario.engine import Engine, Observe, beside, reporting
from kvactors.scenario.replay import cache_config
from kvactors.scenario.report import Progress, Report, Totals, make_report
from kvactors.scenario.spec import FaultSpec, Scenario, events_of
from kvactors.scenario.workload import Script, chat
from kvactors.settings import Config, StorageConfig
from kvactors.settings.sinks import AttentionStoreConfig
from kvactors.storage.factory import make_backend
from kvactors.testing.faults import FaultyBackend, FaultySink, StoreFaults
from kvactors.types import Tier

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
            beside(
                reporting(self.totals, progress),
                *(self._fault(fault) for fault in self.scenario.fault if not fault.turn),
            ),
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
        progress(self.totals)
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
        """End and begin the faults that are counted in turns."""
        for spec in self.scenario.fault:
            if spec.turn and spec.turns and turn == spec.turn + spec.turns:
                await self._target(spec).recover(spec.fault)
        for spec in self.scenario.fault:
            if spec.turn and turn == spec.turn:
                await self._begin(spec)

    def _target(self, spec: FaultSpec) -> FaultySink | StoreFaults:
        if spec.sink:
            return self.sinks[spec.sink]
        backend = self.cache.system.backend
        if not isinstance(backend, FaultyBackend):
            raise TypeError(f"no faults can be injected into {backend!r}")
        return backend.faults

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
    backend = None if store is None else FaultyBackend(store)
    if bare.storage.backend != "attention_store":  # else only the sinks, already open, use it
        bare = replace(bare, attention_store=AttentionStoreConfig())
    async with (
        open_cache(
            bare, sinks=list(sinks.values()), backend=backend, inline_copies=virtual
        ) as cache,
        observe(cache),
    ):
        yield Session(scenario, cache, sinks, virtual=virtual)
