"""A scenario whose cache runs in a separate process that is killed (SIGKILL) and restarted,
while a router and files receive its events.

`python -m kvactors.scenario.processes` is one such process. It reads the scenario as one JSON line,
prints "started", runs the scenario, prints the report and the contents of its tiers, and stays
until its input ends.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import structlog

from kvactors.flush_notifier.sinks.jsonl import replay_jsonl
from kvactors.scenario.child import Child, child, compare, routing
from kvactors.scenario.report import Report
from kvactors.scenario.session import session
from kvactors.scenario.spec import Scenario, events_of
from kvactors.settings.sinks import JsonLinesSinkConfig
from kvactors.storage.inspect import keys_in
from kvactors.types import Tier

PATIENCE = 300.0
"""Seconds for a process to run its workload."""


class FinalReport(msgspec.Struct):
    """The output of a process when it is idle."""

    report: Report
    held: dict[str, list[int]]
    names: dict[str, list[str]]
    sequence: int


async def run_processes(scenario: Scenario, data: dict[str, Any], seed: int) -> Report:
    """Run the workload in one process after another, and kill all but the last as `process.kills`
    sets. Compare the router, and files of JSON lines, with the tiers of the last process."""
    orders = msgspec.json.encode({"data": data, "seed": seed}).decode()
    events = events_of(scenario) if scenario.router.enabled else None
    async with AsyncExitStack() as stack:
        router = None
        if events is not None:
            ends = (
                events.endpoint,
                events.replay_endpoint,
                events.for_model(scenario.cache.model).topic,
            )
            router = await stack.enter_async_context(routing(scenario.router, *ends, seed))
        missing = 0
        for seconds in scenario.process.kills:
            async with child("-m", "kvactors.scenario.processes") as life:
                await start(life, orders)
                await anyio.sleep(seconds)
                await life.kill()
            missing += missing_of(scenario)
        last = await stack.enter_async_context(child("-m", "kvactors.scenario.processes"))
        await start(last, orders)
        rest = msgspec.json.decode(await last.receive(PATIENCE), type=FinalReport)
        report = rest.report
        report.lives = 1 + len(scenario.process.kills)
        report.storage["missing"] = missing
        if router is not None:
            held = {medium: set(hashes) for medium, hashes in rest.held.items()}
            report.router = await compare(router, rest.sequence, held)
            report.flush["divergence"] += report.router["divergence"]
        report.flush["divergence"] += sum(
            differing(sink, rest.names)
            for sink in scenario.flush.sinks
            if isinstance(sink, JsonLinesSinkConfig)
        )
        return report


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


async def start(life: Child, orders: str) -> None:
    """Send a process its scenario, and wait until it has started."""
    await life.send(orders)
    await life.receive()


def differing(sink: JsonLinesSinkConfig, names: dict[str, list[str]]) -> int:
    """Blocks on which a file of JSON lines and the tiers differ."""
    view = replay_jsonl(Path(sink.path))
    tiers = [Tier[tier.upper()] for tier in sink.tiers]
    if sink.granularity == "node":
        truth = {name for tier in tiers for name in names[tier.name or ""]}
        return len({key.hex() for keys in view.values() for key in keys} ^ truth)
    return sum(
        len({key.hex() for key in view[tier]} ^ set(names[tier.name or ""])) for tier in tiers
    )


async def live() -> None:
    """Run one process of the scenario: the code of `python -m kvactors.scenario.processes`."""
    orders = msgspec.json.decode(await anyio.to_thread.run_sync(sys.stdin.readline))
    scenario = Scenario.from_mapping(orders["data"])
    async with session(scenario, virtual=False) as one:
        print("started", flush=True)
        report = await one.run(orders["seed"], lambda _: None)
        media = {tier: str(tier.name) for tier in Tier}
        held: dict[str, list[int]] = {}
        sequence = 0
        settings = events_of(scenario)
        if settings is not None:
            from kvactors.flush_notifier.sinks.kv_wire import MEDIA

            media = MEDIA[settings.media]
            sequence = one.sinks[settings.label].inner.events.sequence  # type: ignore[attr-defined]
        held = {medium: sorted(hashes) for medium, hashes in one.held(media).items()}
        names = {str(tier.name): [key.hex() for key in keys] for tier, keys in one.named().items()}
        print(msgspec.json.encode(FinalReport(report, held, names, sequence)).decode(), flush=True)
        await anyio.to_thread.run_sync(sys.stdin.readline)


if __name__ == "__main__":
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(40),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(live())
