"""The parts of the oracle that tenants share a cache by: forks, hints, pins, quotas, clears of one
salt, sleeps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from kvactors import CacheAsleep, Hints, KVActorsError, Lease, LeaseEnded, LeasesOpen
from kvactors.errors import SleepUnsupported

from .history import EVERYTHING
from .model import Part, Prompt

if TYPE_CHECKING:
    from .client import Request
    from .world import World

SALTS = ("salt-a", "salt-b", "")
REMEMBERED = 40
"""Prompts and pins that are remembered."""


def draw_hints(world: World, rng: random.Random) -> Hints | None:
    """Hints of a request, None for most."""
    drawn = world.drawn
    if rng.random() >= drawn.hints:
        return None
    world.seen["hints"] += 1
    pin = rng.random() < drawn.pins
    ttl = rng.choice((None, None, 0.001, 0.02, 5.0))
    if pin:
        ttl = rng.choice((0.001, 0.02, None)) if drawn.pins_end else None
    return Hints(
        priority=rng.choice((-2, -1, 0, 0, 1, 2)), ttl=ttl, pin=pin, session_ends=rng.random() < 0.1
    )


class Pins:
    """Pinned prompts, which are on the device until something ends their pins."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.epoch = 0
        self._changes = 0  # that may end pins, in progress
        self._held: dict[bytes, Prompt] = {}

    @contextmanager
    def ending(self, part: Part = EVERYTHING, *, only: bytes | None = None) -> Iterator[None]:
        """Within the block pins may end: all of them, those of a part, or one."""
        self.epoch += 1
        self._changes += 1
        if only is not None:
            self._held.pop(only, None)
        else:
            for key, one in list(self._held.items()):
                if one.scope.is_in(part):
                    del self._held[key]
        try:
            yield
        finally:
            self._changes -= 1
            self.epoch += 1

    def begin(self) -> int:
        """A request is about to end. For `add`, -1 if its pin is not to be relied on."""
        return -1 if self._changes or self.world.drawn.pins_end else self.epoch

    def add(self, epoch: int, prompt: Prompt, blocks: int) -> None:
        """A request has ended, and `blocks` are pinned since."""
        self.world.seen["pinned"] += 1
        known = epoch == self.epoch and not self._changes
        if known and not prompt.media and len(self._held) < REMEMBERED:
            one = prompt.copy()
            one.tokens = one.tokens[: blocks * one.block_size]
            self._held[one.digests[blocks - 1]] = one

    def check(self) -> None:
        """Every pinned block is on the device, and no more than the share of them are."""
        world = self.world
        config = world.cache.config
        most = int(config.hints.pin_share * config.device.num_blocks)
        if world.cache.statistics().prefix.pinned > most:
            world.fail(f"more than {most} blocks are pinned")
        if self._changes or world.cache.system.asleep:
            return
        for one in self._held.values():
            if one.scope.namespace != world.cache.system.roots.namespace:
                continue
            full = len(one.tokens) // one.block_size
            found = world.cache.lookup([*one.tokens, 1], salt=one.scope.salt, lora=one.scope.lora)
            world.seen["pins looked up"] += 1
            if found.device < full:
                world.fail(f"{found.device} of {full} pinned blocks are on the device")

    async def unpin(self, rng: random.Random) -> None:
        """End a pin: a known one, or one that does not exist."""
        # The same tokens may be pinned in several namespaces: the call is about the present one.
        namespace = self.world.cache.system.roots.namespace
        known = [item for item in self._held.items() if item[1].scope.namespace == namespace]
        if not known:
            await self.world.cache.unpin([1, 2, 3], salt=rng.choice(SALTS))
            return
        key, one = rng.choice(known)
        with self.ending(only=key):
            blocks = await self.world.cache.unpin(
                one.tokens, salt=one.scope.salt, lora=one.scope.lora
            )
        if not blocks:
            self.world.fail("unpin of pinned blocks found none")


# -- orders


async def set_quota(world: World, rng: random.Random) -> None:
    """Change the quota of a salt in one tier, or in both."""
    sizes = [rng.choice((None, 1, 2, rng.randint(1, 64))) for _ in range(2)]
    storage = sizes[0] if world.drawn.keeps_quotas else None
    await world.cache.set_quota(
        rng.choice(SALTS), device=sizes[0], host=sizes[1], storage=storage, deadline=30.0
    )


def draw_part(rng: random.Random) -> dict[str, str]:
    """A salt, or the adapter."""
    return rng.choice((*({"salt": salt} for salt in SALTS), {"lora": "lora"}))


async def clear_part(world: World, rng: random.Random) -> None:
    """Clear a salt, in some stores too, or an adapter. From its return on none of its blocks computed
    before may be hit, unless a store kept them: in a later process those of an adapter."""
    part, history = draw_part(rng), world.history
    world.seen[f"clear {min(part)}"] += 1
    open_at = history.open_now()
    storage = "salt" in part and world.drawn.keeps_quotas and rng.random() < 0.5
    world.seen["clear salt and storage"] += storage
    kept = world.drawn.store == "file" if "lora" in part else world.drawn.store != "none"
    complete = storage or not kept
    number = history.clear() if complete else 0
    with world.pins.ending(part):
        await world.cache.clear(**part, storage=storage, deadline=30.0)
    if number:
        history.cleared(number, open_at, part)
        await history.settle()


async def sleep(world: World, rng: random.Random) -> None:
    """Sleep and wake, mostly after a pause that lets leases end."""
    cache, level = world.cache, rng.choice((1, 2))
    world.draining = True
    try:
        if rng.random() < 0.8:
            await cache.pause(deadline=0.05)
            for _ in range(2000):
                if not world.leases and not cache.statistics().prefix.leases:
                    break
                await asyncio.sleep(0.001)
        with world.pins.ending():
            await _sleep(world, rng, level)
    finally:
        world.draining = False
        while cache.system.asleep or cache.system.sizing is not None:
            with suppress(CacheAsleep):
                await cache.wake(deadline=30.0)
                break
            await asyncio.sleep(0.001)
        await cache.resume(deadline=30.0)


async def _sleep(world: World, rng: random.Random, level: int) -> None:
    cache = world.cache
    task = asyncio.ensure_future(cache.sleep(level, deadline=rng.choice((0.001, 5.0, 5.0))))
    try:
        if rng.random() < 0.2:
            for _ in range(rng.randrange(30)):
                await asyncio.sleep(0)
            task.cancel()
        await task
    except (LeasesOpen, SleepUnsupported) as error:
        world.seen[f"sleep {type(error).__name__}"] += 1
        return
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        world.seen["sleep cut"] += 1
        return
    finally:
        task.cancel()
    world.seen[f"slept {level}"] += 1
    for call in (cache.acquire("asleep", [1]), cache.clear(), cache.sleep()):
        try:
            await call
        except CacheAsleep:
            continue
        world.fail("a call of a cache that sleeps was answered")


# -- forks


async def branch(request: Request, depth: int = 0) -> None:
    """Fork a request. Every branch computes its own continuation, and its blocks hold its bytes
    while the others compute theirs."""
    from .client import Cut

    world, rng, lease = request.world, request.rng, request.lease
    count, table = rng.choice((1, 1, 2, 4)), tuple(lease.block_table)
    try:
        made = await request.client.call(lambda: _fork(lease, count, rng))
    except Cut:
        world.seen["fork cut"] += 1
        request.cut = True
        await lease.commit(0)
        return
    except KVActorsError as error:
        world.judge("fork", error, cut=request.cut)
        if isinstance(error, LeaseEnded):
            raise
        if tuple(lease.block_table) != table:
            world.fail("a refused fork changed the lease")
        return
    world.seen["forked"] += len(made)
    world.seen["forks of a fork"] += len(made) * (depth > 0)
    try:
        branches = [request.branch(one) for one in made]
        for one in branches:
            one.check_fork(request)
        rng.shuffle(branches)
        for one in branches:
            await _continue(one, depth)
            request.check_bytes("beside a branch")
            for other in branches:
                other.check_bytes("beside another branch")
        for one in branches:
            await _end(one)
            request.check_bytes("after a branch")
    finally:
        for one in made:
            one.abandon()


async def _fork(lease: Lease, count: int, rng: random.Random) -> tuple[Lease, ...]:
    deadline = rng.choice((0.02, 2.0))
    if count == 1:
        return (await lease.fork(deadline=deadline),)
    names = [f"{lease.request_id}-{number}" for number in range(count)]
    return await lease.fork_many(count, names, deadline=deadline)


async def _continue(one: Request, depth: int) -> None:
    from .client import Cut

    try:
        await one.decode()
        one.world.seen["branches computed"] += 1
        if depth < 2 and one.rng.random() < 0.3:
            await branch(one, depth + 1)
    except Cut:
        pass
    except KVActorsError as error:
        one.world.judge("a call on a branch", error, cut=one.cut)
        one.over = isinstance(error, LeaseEnded)


async def _end(one: Request) -> None:
    if one.over or one.rng.random() < 0.3:
        one.lease.abandon()
        one.over = True
        return
    one.check_bytes("at the end of a branch")
    one.over = True
    try:
        await one.finish()
    except KVActorsError as error:
        one.world.judge("finish of a branch", error, cut=one.cut)


# -- at rest


async def compare_clears(world: World) -> None:
    """At rest: after the clear of a part none of its blocks is found, and all others are."""
    cache, rng = world.cache, world.rng

    def found() -> list[tuple[int, int]]:
        hits = [
            cache.lookup([*one.tokens, 1], salt=one.scope.salt, lora=one.scope.lora)
            for one in prompts
        ]
        return [(one.device, one.host) for one in hits]

    namespace = cache.system.roots.namespace
    prompts = [one for one in world.prompts if one.scope.namespace == namespace]
    before, part = found(), draw_part(rng)
    with world.pins.ending(part):
        await cache.clear(**part, deadline=30.0)
    for one, was, now in zip(prompts, before, found(), strict=True):
        if one.scope.is_in(part):
            world.seen[f"clear {min(part)} compared"] += 1
            if any(now):
                world.fail(f"{now} blocks of {part} are found after its clear")
        elif was != now:
            world.fail(f"the clear of {part} changed {was} blocks to {now}")


def count_statistics(world: World) -> None:
    """Add the cache's statistics of sharing to the counts."""
    statistics = world.cache.statistics()
    world.seen["pins refused"] += statistics.prefix.pins_refused
    world.seen["pins expired"] += statistics.prefix.pins_expired
