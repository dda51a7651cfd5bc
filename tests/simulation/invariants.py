"""Invariants that must hold when every fault is over and nothing is left to do."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import numpy as np
import xxhash

from kvactors.errors import KVActorsError, NoRoom
from kvactors.flush_notifier.tasks import path_tokens
from kvactors.observe.statistics import announceable
from kvactors.scenario.engine import Engine, Request
from kvactors.scenario.report import Totals
from kvactors.storage.breaker import PAUSE
from kvactors.testing.attentionstore_sdk import services
from kvactors.testing.rest import left_over
from tests.simulation.draw import BLOCK, INDEX
from tests.simulation.sharing import check_clear, check_sharing
from tests.simulation.world import World
from tests.support.rank_process import keys_on_rank

REST = 60.0
"""Virtual seconds in which a healthy system must have come to rest."""


async def rest(world: World) -> None:
    """Heal everything, come to rest, and check everything."""
    await world.heal()
    cache = world.cache
    await asyncio.sleep(1.0)  # the actor that failed last is back
    try:
        await cache.resume(deadline=5.0)
        gc.collect()  # leases that only a traceback still held
        await cache.wait_idle(REST)
        await asyncio.sleep(PAUSE + 1.0)  # the store's circuit is tried again
        await cache.wait_idle(REST)
        await cache.wait_flushed(REST)
    except KVActorsError as error:
        world.violated(f"it does not come to rest: {error!r}")
    still(world)
    await serves_again(world)
    try:
        if world.drawn.extra.orders:
            await check_clear(world)
        await cache.wait_idle(REST)
        await cache.wait_flushed(REST)
    except KVActorsError as error:
        world.violated(f"it does not come to rest again: {error!r}")
    still(world)


def still(world: World) -> None:
    """At rest: nothing is left over, the models of sinks, slots, stores and indexes agree, and
    every byte below the device is right."""
    for what in left_over(world.cache):
        world.violated(f"at rest: {what}")
    for sink in world.sinks:
        for what in sink.reader.violations:
            world.violated(f"tree rule: {sink.name}: {what}")
    world.seen["load overdue"] += world.cache.statistics().prefix.overdue_loads
    _supervision(world)
    _bytes_below(world)
    _token_index(world)
    if world.drawn.extra.orders:
        check_sharing(world)


def _supervision(world: World) -> None:
    supervisor = world.system.supervisor
    failures = supervisor.statistics().failures
    if supervisor.failed is not None:
        world.violated(f"the system failed: {supervisor.failed!r}")
    if failures != world.recorder.failures:
        world.violated(
            f"{failures} failures, {world.recorder.failures} by plan; the last: "
            f"{supervisor.statistics().last_failure}"
        )


def _bytes_below(world: World) -> None:
    """Slots and objects hold the bytes of their keys. An object may be bad, but only with a
    checksum that differs."""
    if not world.ranks:
        system = world.system
        for key, entry in system.evictor_actor.host.blocks.items():
            if not entry.arriving and bytes(system.arena.view(entry.slot)) != world.model.bytes_of(
                key
            ):
                world.violated("a host slot holds wrong bytes")
    for rank, store in enumerate(world.stores):
        for key in store.catalog.keys():  # noqa: SIM118  (no mapping)
            data, checksum = store.objects.get(key, (b"", -1))
            share = keys_on_rank(key, rank) if world.ranks else key
            if xxhash.xxh3_64_intdigest(data) == checksum and data != world.model.bytes_of(share):
                world.violated("a stored object holds wrong bytes, and its checksum agrees")


def _token_index(world: World) -> None:
    """AttentionStore's index has no path that is not announceable."""
    if not world.drawn.token_index:
        return
    entries = world.system.notifier_actor.ledger.blocks
    (view,) = (sink.filter for sink in world.sinks if sink.name == INDEX)
    held = [entries[key] for keys in announceable(world.system, view).values() for key in keys]
    paths = {tuple(np.frombuffer(path_tokens(entry), "<u4").tolist()) for entry in held}
    stale = {path for one in services.values() for path in one.resident} - paths
    world.seen["index compared"] += 1
    if stale:
        world.violated(
            f"AttentionStore's index has {len(stale)} paths that this node does not hold"
        )


async def serves_again(world: World) -> None:
    """Every family's longest prompt, one after another: no fault is left that could excuse
    anything."""
    drawn = world.drawn

    async def wrong(_request: Request, positions: Sequence[int], when: str) -> None:
        world.violated(f"wrong bytes after all faults: {len(positions)} blocks {when}")

    engine = Engine(world.cache, Totals(), world.model, thorough=True, on_wrong=wrong)
    for family in range(drawn.families):
        tokens = [family * 10_000 + i for i in range(drawn.longest * BLOCK)]
        try:
            await _serve(world, engine, f"after {family}", tokens)
        except NoRoom as error:
            pinned = world.system.index_actor.core.pins.blocks  # no request can have them
            if drawn.longest <= drawn.config.device.num_blocks - pinned:
                world.violated(f"no room after all faults, with nobody else there: {error}")
        except KVActorsError as error:
            world.violated(f"not served after all faults: {error!r}")


async def _serve(world: World, engine: Engine, name: str, tokens: list[int]) -> None:
    try:
        await engine.serve(name, tokens)
    except NoRoom:
        if not world.ranks:
            raise
        # The messages of a copy may take longer than `ranks.timeout_s` without any fault. Its blocks
        # are out of use until each rank has answered.
        await world.cache.wait_idle()
        await engine.serve(f"{name}, again", tokens)
