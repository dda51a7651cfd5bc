"""Invariants that must hold when every fault is over and nothing is left to do."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import numpy as np
import xxhash

from kvactors.cache import KVCache
from kvactors.cpu_evictor.memory import NOT_FETCHED
from kvactors.errors import KVActorsError, NoRoom
from kvactors.observe.statistics import announceable
from kvactors.scenario.engine import Engine, ScenarioRequest
from kvactors.scenario.report import Totals
from kvactors.storage.attempts import PAUSE_S
from kvactors.testing.sim import left_over
from tests.flush_notifier.helpers import path_tokens
from tests.simulation.draw import BLOCK, INDEX, Draw
from tests.simulation.sharing import check_clear, check_sharing
from tests.simulation.world import World
from tests.support.attentionstore_sdk import services
from tests.support.rank_process import keys_on_rank

GOOD_REASONS = ("not_fetched_gone", "not_fetched_few")
"""Reasons for which a healthy cache does not fetch a stored block: the store evicted it, or it is
damaged, or too few were found."""

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
        await asyncio.sleep(PAUSE_S + 1.0)  # the store's circuit is tried again
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
        for key in store.catalog:
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

    async def wrong(_request: ScenarioRequest, positions: Sequence[int], when: str) -> None:
        world.violated(f"wrong bytes after all faults: {len(positions)} blocks {when}")

    engine = Engine(world.cache, Totals(), world.model, thorough=True, on_wrong=wrong)
    for family in range(drawn.families):
        tokens = prompt(drawn, family)
        try:
            await _serve(world, engine, f"after {family}", tokens)
        except NoRoom as error:
            pinned = world.system.index_actor.index.tree.pinned  # no request can have them
            if drawn.longest <= drawn.config.device.num_blocks - pinned:
                world.violated(f"no room after all faults, with nobody else there: {error}")
        except KVActorsError as error:
            world.violated(f"not served after all faults: {error!r}")
    await promised(world, engine)


def prompt(drawn: Draw, family: int) -> list[int]:
    """The longest prompt of a family."""
    return [family * 10_000 + i for i in range(drawn.longest * BLOCK)]


async def promised(world: World, engine: Engine) -> None:
    """Requests of every family at once get the blocks that `lookup` has announced, but for blocks
    that were evicted since. No stored block is missed for another reason than `GOOD_REASONS`."""
    cache, drawn = world.cache, world.drawn
    if world.system.device_store is not None or world.ranks:
        return  # the index of the store answers, or a rank may be slow without a fault
    await cache.wait_idle(REST)
    before = _losses(cache)
    found, got = dict[int, int](), dict[int, int]()

    async def one(family: int) -> None:
        tokens = prompt(drawn, family)
        found[family] = sum(cache.lookup(tokens))
        try:
            lease = await engine.serve(
                f"promised {family}", tokens, wait_for_room=True, deadline=REST
            )
        except NoRoom:
            return  # pinned blocks take too much of the device
        got[family] = lease.cached_tokens // BLOCK

    await asyncio.gather(*(one(family) for family in range(drawn.families)))
    await cache.wait_idle(REST)
    after = _losses(cache)
    lost = {name: after[name] - before[name] for name in after}
    missed = sum(max(0, found[family] - hits) for family, hits in got.items())
    world.seen["promises compared"] += len(got)
    world.seen["promised blocks"] += sum(found[family] for family in got)
    if missed > sum(lost.values()):
        world.violated(f"{missed} blocks that lookup found were not hit: {lost}")
    unfounded = {
        name: n
        for name, n in lost.items()
        if n and name in NOT_FETCHED and name not in GOOD_REASONS
    }
    if unfounded:
        world.violated(f"stored blocks were not fetched without a fault: {unfounded}")


def _losses(cache: KVCache) -> dict[str, int]:
    """Blocks that left a tier, and stored blocks that were not fetched, by reason."""
    found = cache.statistics()
    counts = {name: getattr(found.host, name) for name in NOT_FETCHED}
    stored = 0 if found.store is None else found.store.evicted
    return counts | {"device": found.prefix.evicted, "host": found.host.evicted, "store": stored}


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
