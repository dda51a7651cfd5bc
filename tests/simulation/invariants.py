"""Invariants that must hold when every fault is over and nothing is left to do."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import numpy as np
import xxhash

from kvactors.cache import KVCache
from kvactors.cpu_evictor.memory import NOT_FETCHED
from kvactors.errors import DeadlineExceeded, KVActorsError, NoRoom
from kvactors.native import DEVICE
from kvactors.observe.invariants import listing
from kvactors.quotas import salt_id
from kvactors.storage.attempts import PAUSE_S
from kvactors.testing.sim import left_over
from kvactors.types import HASH_BYTES, split_hashes
from tests.flush_notifier.helpers import path_tokens
from tests.load.batch import Batch
from tests.load.client import Client, compare_clears, family_prompt
from tests.load.ground import Prompt
from tests.simulation.draw import BLOCK, INDEX
from tests.simulation.world import World
from tests.support.announced import announceable
from tests.support.attentionstore_sdk import services
from tests.support.rank_process import keys_on_rank

GOOD_REASONS = tuple(f"not_fetched_{why}" for why in ("gone", "many", "slow", "backlog"))
"""Reasons for which a healthy cache does not fetch a stored block: the store evicted it, or it is
damaged, too many were found, or computing them takes less time."""

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
        world.fail(f"it does not come to rest: {error!r}")
    still(world)
    await serves_again(world)
    try:
        if "clear part" in world.mix.orders:
            await compare_clears(world, random.Random(world.drawn.seed))
        await cache.wait_idle(REST)
        await cache.wait_flushed(REST)
    except KVActorsError as error:
        world.fail(f"it does not come to rest again: {error!r}")
    still(world)


def still(world: World) -> None:
    """At rest: nothing is left over, the models of sinks, slots, stores and indexes agree, and
    every byte below the device is right."""
    for what in left_over(world.cache):
        world.fail(f"at rest: {what}")
    for sink in world.sinks:
        for what in sink.reader.violations:
            world.fail(f"tree rule: {sink.name}: {what}")
    world.seen["load overdue"] += world.cache.statistics().prefix.overdue_loads
    _supervision(world)
    _bytes_below(world)
    _token_index(world)
    if "clear part" in world.mix.orders:
        check_sharing(world)


def check_sharing(world: World) -> None:
    """At rest: pins are capped and on the device, and both tiers have the pins and quotas of the
    index."""
    system = world.system
    core, host = system.index_actor, system.evictor_actor.host
    pinned: set[bytes] = set()
    for pin in core.pins._pins.values():
        if pin.nodes is not None:
            pinned.update(split_hashes(pin.hashes))
    resident = {key for nodes in listing(system) for key, state in nodes if state & DEVICE}
    world.seen["pins compared"] += len(pinned)
    counted, limit = core.index.tree.pinned, core.settings.pin_share * core.index.pool.total
    if pinned - resident:
        world.fail(f"{len(pinned - resident)} pinned blocks are not on the device")
    if len(pinned) != counted or len(pinned) > limit:
        world.fail(f"{len(pinned)} blocks of pins, {counted} counted, limit {limit}")
    for store in world.stores:
        store.catalog.check()
    size = core.index.turn_blocks * HASH_BYTES
    wanted = Counter(
        pin.hashes[start : start + size][-HASH_BYTES:]
        for pin in core.pins._pins.values()
        for start in range(0, len(pin.hashes), size)
    )
    if host.shares._pins - wanted:
        world.fail("host blocks are pinned that the index has not pinned")
    for salt, quota in system.index_actor.index.policy.quotas:
        if host.shares.quota(salt_id(salt)) != (float("inf") if quota.host is None else quota.host):
            world.fail("the host tier has another quota of a salt than the index")


def _supervision(world: World) -> None:
    supervisor = world.system.supervisor
    failures = supervisor.statistics().failures
    if supervisor.failed is not None:
        world.fail(f"the system failed: {supervisor.failed!r}")
    if failures != world.recorder.failures:
        world.fail(
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
                world.fail("a host slot holds wrong bytes")
    for rank, store in enumerate(world.stores):
        for key in store.catalog:
            data, checksum = store.objects.get(key, (b"", -1))
            share = keys_on_rank(key, rank) if world.ranks else key
            if xxhash.xxh3_64_intdigest(data) == checksum and data != world.model.bytes_of(share):
                world.fail("a stored object holds wrong bytes, and its checksum agrees")


def _token_index(world: World) -> None:
    """AttentionStore's index has no path that is not announceable."""
    if not world.drawn.token_index:
        return
    ledger = world.system.notifier_actor.ledger
    (view,) = (sink.filter for sink in world.sinks if sink.name == INDEX)
    held = set().union(*announceable(world.system, view).values())
    paths = {tuple(np.frombuffer(path_tokens(ledger, key), "<u4").tolist()) for key in held}
    stale = {path for one in services.values() for path in one.resident} - paths
    world.seen["index compared"] += 1
    if stale:
        world.fail(f"AttentionStore's index has {len(stale)} paths that this node does not hold")


async def serves_again(world: World) -> None:
    """Every family's longest prompt, one after another: no fault is left that could excuse
    anything."""
    mix, blocks = world.mix, world.drawn.config.device.num_blocks
    client = Client(world, "at rest", lambda: False)
    for family in range(mix.families):
        prompt = Prompt(family_prompt(family, mix.longest * BLOCK))
        try:
            try:
                await Batch(client).serve(prompt)
            except NoRoom:
                if not world.ranks:
                    raise
                # The messages of a copy may take longer than `ranks.timeout_s` without any fault.
                # Its blocks are out of use until each rank has answered.
                await world.cache.wait_idle()
                await Batch(client).serve(prompt)
        except NoRoom as error:
            pinned = world.system.index_actor.index.tree.pinned  # no request can have them
            if mix.longest <= blocks - pinned:
                world.fail(f"no room after all faults, with nobody else there: {error}")
        except KVActorsError as error:
            world.fail(f"not served after all faults: {error!r}")
    await promised(world, client)


async def promised(world: World, client: Client) -> None:
    """Requests of every family at once get the blocks that `lookup` has announced, but for blocks
    that were evicted since. No stored block is missed for another reason than `GOOD_REASONS`."""
    cache, mix = world.cache, world.mix
    if world.system.device_store is not None or world.ranks:
        return  # the index of the store answers, or a rank may be slow without a fault
    await cache.wait_idle(REST)
    before = _losses(cache)
    found, got = dict[int, int](), dict[int, int]()

    async def one(family: int) -> None:
        prompt = Prompt(family_prompt(family, mix.longest * BLOCK))
        found[family] = sum(cache.lookup(prompt.tokens))
        try:
            lease = await Batch(client).serve(prompt, REST, wait_for_room=True)
        except NoRoom:
            return  # it is too large, or pinned blocks take too much of the device
        except DeadlineExceeded:
            if world.system.index_actor.index.tree.pinned:
                return
            raise
        got[family] = lease.cached_tokens // BLOCK

    await asyncio.gather(*(one(family) for family in range(mix.families)))
    await cache.wait_idle(REST)
    after = _losses(cache)
    lost = {name: after[name] - before[name] for name in after}
    missed = sum(max(0, found[family] - hits) for family, hits in got.items())
    world.seen["promises compared"] += len(got)
    world.seen["promised blocks"] += sum(found[family] for family in got)
    if missed > sum(lost.values()):
        world.fail(f"{missed} blocks that lookup found were not hit: {lost}")
    unfounded = {
        name: n
        for name, n in lost.items()
        if n and name in NOT_FETCHED and name not in GOOD_REASONS
    }
    if unfounded:
        world.fail(f"stored blocks were not fetched without a fault: {unfounded}")


def _losses(cache: KVCache) -> dict[str, int]:
    """Blocks that left a tier, and stored blocks that were not fetched, by reason."""
    found = cache.statistics()
    counts = {name: getattr(found.host, name) for name in NOT_FETCHED}
    stored = 0 if found.store is None else found.store.evicted
    return counts | {"device": found.prefix.evicted, "host": found.host.evicted, "store": stored}
