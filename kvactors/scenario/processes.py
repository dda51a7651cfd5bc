"""A scenario whose cache runs in a separate process that is killed (SIGKILL) and restarted,
while a router and files receive its events.

`python -m kvactors.scenario.processes` is one such process. It reads the scenario as one JSON line,
prints "started", runs the scenario, prints the report and the contents of its tiers, and stays
until its input ends.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from kvactors.flush_notifier.sinks.jsonl import replay_jsonl
from kvactors.scenario.child import Child, child, compare, log_errors_only, routing, say
from kvactors.scenario.report import Report
from kvactors.scenario.session import session
from kvactors.scenario.spec import Scenario, events_of
from kvactors.settings.sinks import JsonLinesSinkConfig
from kvactors.storage.inspect import keys_in
from kvactors.types import Tier

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
    async with child("-m", "kvactors.scenario.processes") as process:
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
    """Run one process of the scenario: the code of `python -m kvactors.scenario.processes`."""
    orders = msgspec.json.decode(await anyio.to_thread.run_sync(sys.stdin.readline))
    async with session(Scenario.from_mapping(orders["data"]), virtual=False) as one:
        print("started", flush=True)
        report = await one.run(orders["seed"], lambda _: None)
        sequence, held = one.published()
        names = {str(tier.name): {key.hex() for key in keys} for tier, keys in one.named().items()}
        say(FinalReport(report, held, names, sequence))
        await anyio.to_thread.run_sync(sys.stdin.readline)


if __name__ == "__main__":
    log_errors_only()
    asyncio.run(live())
