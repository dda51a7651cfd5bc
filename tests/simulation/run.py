"""One seed, from its draw to its report."""

from __future__ import annotations

import asyncio
import gc
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import anyio
import msgspec
import structlog

from kvactors.actor.log import structlog_settings
from kvactors.errors import KVActorsError
from kvactors.testing.loop import SimLoop, simulate
from kvactors.testing.plan import FaultPlan
from tests.load.client import Client
from tests.simulation.draw import Draw, draw_run, with_sharing
from tests.simulation.invariants import rest
from tests.simulation.limits import OVERTAKINGS, limited
from tests.simulation.record import SeedReport
from tests.simulation.world import World
from tests.support.attentionstore_sdk import install, reset
from tests.support.progress_watch import ProgressWatch
from tests.support.share_watch import ShareWatch

WORK = 300.0
"""Virtual seconds in which all clients must have ended."""

AGAIN = 3
"""Requests of each client in a second world."""

STOP = 120.0
"""Virtual seconds in which a system at rest must have stopped."""


def run_seed(
    seed: int,
    drawn: Draw | None = None,
    keep: int = 200,
    *,
    direct: float = 0.0,
    sharing: bool = False,
) -> SeedReport:
    """Run one seed. drawn: in place of what the seed draws. keep: lines of the trace in the report,
    the last ones. direct: share of the asks that may be inline turns, by the seed as well. sharing:
    see `with_sharing`."""
    drawn = drawn or draw_run(seed)
    drawn = with_sharing(drawn) if sharing else drawn
    report = SeedReport(seed)
    report.config = msgspec.json.encode(drawn.config).decode()
    report.plan = msgspec.json.encode(drawn.plan).decode()
    began = time.perf_counter()
    install()
    reset()
    with _quiet(), limited(drawn.limits):
        try:
            simulate(lambda: _lives(drawn, report, keep), loop=SimLoop(seed, direct=direct))
        except Exception as error:
            report.violations.append(f"the run itself broke: {error!r}")
    report.wrong = sum("wrong bytes" in what for what in report.violations)
    report.wall_s = time.perf_counter() - began
    return report


async def _lives(drawn: Draw, report: SeedReport, keep: int) -> None:
    """Run a world, and for some seeds a second one, without faults, on the stores that the first
    has left."""
    world = await _live(World(drawn, keep), report)
    if drawn.again:
        report.seen["lives again"] = 1
        again = drawn._replace(plan=FaultPlan(), stop_at=None, requests=AGAIN)
        await _live(World(again, keep, world.stores), report)


async def _live(world: World, report: SeedReport) -> World:
    """Run one world from its start to its stop."""
    loop, drawn = asyncio.get_running_loop(), world.drawn
    world.violations = report.violations
    world.recorder.note(f"a world after {report.trace}")
    loop.set_exception_handler(lambda _loop, context: _unhandled(world, context))
    clients = [
        Client(world, f"{drawn.seed} {number}", iter([True] * drawn.requests + [False]).__next__)
        for number in range(drawn.clients)
    ]
    ended = False
    try:
        with anyio.move_on_after(2 * (WORK + STOP)), ExitStack() as stack:
            watch = ShareWatch(world.fail, world.seen)
            progress = ProgressWatch(world.fail, world.seen, drawn.limits[OVERTAKINGS])
            world.system.supervisor.instruments.add(progress)
            stack.enter_context(progress.installed())
            async with world.running():
                stack.enter_context(watch.installed())
                tasks = [
                    loop.create_task(client.run(), name=f"client {client.name}")
                    for client in clients
                ]
                if drawn.stop_at is None:
                    await _work(world, tasks)
                    await rest(world)
                else:
                    await asyncio.sleep(drawn.stop_at)
                stopping = loop.time()
            await _work(world, tasks)
            if loop.time() - stopping > STOP:
                world.fail(f"it took {loop.time() - stopping:.1f} s to stop")
            ended = True
        if not ended:
            world.fail("it never came to its end")
        gc.collect()  # errors not retrieved yet are reported now
        await asyncio.sleep(0)
    except KVActorsError as error:
        world.fail(f"the system broke: {error!r}")
    finally:
        _conclude(report, world)
    return world


async def _work(world: World, tasks: list[asyncio.Task[None]]) -> None:
    """Until all clients have ended."""
    _done, late = await asyncio.wait(tasks, timeout=WORK)
    if late:
        world.fail(f"{len(late)} clients have not ended after {WORK} s")
        for task in late:
            task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            world.fail(f"a client broke: {result!r}")


def _unhandled(world: World, context: dict[str, Any]) -> None:
    world.fail(f"the loop was told: {context.get('message')}: {context.get('exception')!r}")


def _conclude(report: SeedReport, world: World) -> None:
    recorder = world.recorder
    report.requests += world.requests
    report.answered += world.finished
    report.verified += world.model.verified
    report.faults += sum(
        count for what, count in recorder.seen.items() if what.startswith(("fault ", "crash "))
    )
    report.turns += sum(recorder.turns.values())
    report.virtual_s = round(asyncio.get_running_loop().time(), 6)
    report.trace = recorder.digest.hexdigest()
    report.seen = dict(sorted((recorder.seen + Counter(report.seen)).items()))
    report.tail += recorder.lines


@contextmanager
def _quiet() -> Iterator[None]:
    """No log lines, no warnings of leases forgotten on purpose, and no automatic garbage
    collection."""
    collecting = gc.isenabled()
    gc.disable()
    gc.freeze()  # earlier objects are not scanned each time
    try:
        with (
            warnings.catch_warnings(),
            structlog_settings(wrapper_class=structlog.make_filtering_bound_logger(50)),
        ):
            warnings.simplefilter("ignore", ResourceWarning)
            # a job that is cancelled before its first step leaves its coroutine as it was
            warnings.filterwarnings(
                "ignore", message="coroutine .* was never awaited", category=RuntimeWarning
            )
            yield
            gc.collect()
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
