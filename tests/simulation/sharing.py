"""The parts of a run that tenants share a cache by: forks, sleeps, quotas, hints, pins, clears of
one salt. Drawn apart from the rest of a run, so that a seed without them stays as it is."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvactors.hints import Hints
from kvactors.native import DEVICE
from kvactors.observe.invariants import listing
from kvactors.quotas import salt_id
from kvactors.settings.tables import HintsConfig, QuotaConfig, SaltQuota
from kvactors.testing.plan import FaultPlan
from kvactors.types import HASH_BYTES, split_hashes
from tests.simulation.limits import draw_limit

if TYPE_CHECKING:
    from tests.simulation.draw import Draw
    from tests.simulation.world import World

SALTS = ("salt", "other", "")


class Extra(NamedTuple):
    """Shares of requests that are forked and that have hints, of hints that are pins, of orders
    that are sleeps and that are about salts and pins. cut: of forks and sleeps that are
    cancelled. waits: of requests with `wait_for_room`. batches: of requests that are batches."""

    forks: float = 0.0
    sleeps: float = 0.0
    hints: float = 0.0
    pins: float = 0.0
    orders: float = 0.0
    cut: float = 0.0
    waits: float = 0.35
    batches: float = 0.1


def with_sharing(drawn: Draw) -> Draw:
    """The same run with these parts."""
    rng = random.Random(drawn.seed * 4001)
    extra = Extra(
        forks=rng.choice((0.0, 0.2, 0.6)),
        sleeps=rng.choice((0.0, 0.2, 0.5)),
        hints=rng.choice((0.2, 0.8)),
        pins=rng.choice((0.0, 0.3, 0.8)),
        orders=rng.choice((0.2, 0.5)),
        cut=rng.choice((0.0, 0.2)),
        batches=rng.choice((0.05, 0.2, 0.5)),
    )
    salts = {salt: SaltQuota(_size(rng), _size(rng)) for salt in SALTS if rng.random() < 0.4}
    quota = QuotaConfig(_size(rng), _size(rng), salts)
    if _keeps_quotas(drawn):
        quota = _with_storage(random.Random(f"storage quota {drawn.seed}"), quota)
    config = msgspec.structs.replace(
        drawn.config, quota=quota, hints=HintsConfig(rng.choice((0.1, 0.25, 0.25, 0.5, 1.0)))
    )
    return drawn._replace(config=config, extra=extra)


def with_crowd(drawn: Draw) -> Draw:
    """The same run without faults, with more clients whose prompts, and pins, take up to the whole
    device."""
    rng = random.Random(drawn.seed * 5003)
    drawn = with_sharing(drawn)
    blocks = drawn.config.device.num_blocks
    extra = drawn.extra._replace(hints=0.7, pins=0.5, orders=0.5, sleeps=0.0, waits=0.6, cut=0.1)
    hints = HintsConfig(rng.choice((0.25, 0.5, 1.0)))
    return drawn._replace(
        config=msgspec.structs.replace(drawn.config, hints=hints),
        extra=extra,
        plan=FaultPlan(),
        stop_at=None,
        clients=rng.randint(4, 10),
        requests=12,
        families=rng.randint(2, 8),
        longest=rng.choice((blocks, max(2, blocks // 2))),
    )


def _keeps_quotas(drawn: Draw) -> bool:
    """Whether its store keeps quotas of salts: one of this process, not a pool."""
    config = drawn.config
    stored = config.storage.backend == "memory" and not config.flush.flush_only
    return stored and config.ranks.count == 1 and not drawn.shared


def _with_storage(rng: random.Random, quota: QuotaConfig) -> QuotaConfig:
    salts = {
        salt: msgspec.structs.replace(one, storage=_size(rng)) for salt, one in quota.salts.items()
    }
    return msgspec.structs.replace(quota, storage=_size(rng), salts=salts)


def _size(rng: random.Random) -> int | None:
    return draw_limit(rng, 1, 24) if rng.random() < 0.6 else None


def draw_hints(world: World, rng: random.Random) -> Hints | None:
    """Hints of a request, None for some."""
    extra = world.drawn.extra
    if rng.random() >= extra.hints:
        return None
    world.seen["hints"] += 1
    return Hints(
        priority=rng.choice((-2, -1, 0, 0, 1, 2)),
        ttl=rng.choice((None, None, 0.001, 0.05, 5.0)),
        pin=rng.random() < extra.pins,
    )


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
        world.violated(f"{len(pinned - resident)} pinned blocks are not on the device")
    if len(pinned) != counted or len(pinned) > limit:
        world.violated(f"{len(pinned)} blocks of pins, {counted} counted, limit {limit}")
    for store in world.stores:
        store.catalog.check()
    size = core.index.turn_blocks * HASH_BYTES
    wanted = Counter(
        pin.hashes[start : start + size][-HASH_BYTES:]
        for pin in core.pins._pins.values()
        for start in range(0, len(pin.hashes), size)
    )
    if host.shares._pins - wanted:
        world.violated("host blocks are pinned that the index has not pinned")
    for salt, quota in system.index_actor.index.policy.quotas:
        if host.shares.quota(salt_id(salt)) != (float("inf") if quota.host is None else quota.host):
            world.violated("the host tier has another quota of a salt than the index")


async def check_clear(world: World) -> None:
    """At rest: after the clear of a salt none of its blocks is on device or host, and every other
    block is where it was."""
    system, salt = world.system, random.Random(world.drawn.seed).choice(SALTS)
    await world.cache.wait_idle(60.0)
    before = _held(world)
    await world.cache.clear(salt=salt, deadline=5.0)
    await world.cache.wait_idle(60.0)
    after = _held(world)
    number = salt_id(salt)
    world.seen["clear salt compared"] += 1
    if system.index_actor.index.tree.owner(number)[0] or any(
        block.salt == number for block in system.evictor_actor.host.blocks.values()
    ):
        world.violated("blocks of a salt are left after its clear")
    if before.salts and {k: n for k, n in before.salts.items() if k != number} != after.salts:
        world.violated("the clear of a salt changed device blocks of another")
    if {k for k, owner in before.host.items() if owner != number} != after.host.keys():
        world.violated("the clear of a salt changed host blocks of another")


class Held(NamedTuple):
    """salts: device blocks by salt. host: the salts of the host blocks."""

    salts: dict[int, int]
    host: dict[bytes, int]


def _held(world: World) -> Held:
    system = world.system
    owners = system.index_actor.index.tree.owners()
    return Held(
        {salt: counts[0] for salt, counts in owners.items() if counts[0]},
        {key: block.salt for key, block in system.evictor_actor.host.blocks.items()},
    )
