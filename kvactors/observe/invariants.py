"""Invariants of a whole system.

Each actor is checked separately at any time. State that two actors hold is compared while the
system is idle: the comparison ends without a result when it is no longer idle.

The checks run in steps, so that a production loop can run other tasks in between. A change between
two steps can look like a violation: such an actor is checked again in one step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice

from kvactors.actor import Actor
from kvactors.actor.clock import now
from kvactors.actor.log import described
from kvactors.actor.sliced import Sliced, T, finish
from kvactors.native import DEVICE, HOST
from kvactors.prefix_index.reports import IndexStatistics
from kvactors.system import System
from kvactors.tables import ShardedSet
from kvactors.types import Tier, split_hashes

SLICE_S = 0.0003  # time of steps before other tasks run: the last may take three times as long
PAGE_KEYS = 64  # keys a step
GATHER_ATTEMPTS = 3  # attempts to collect the keys of a tier while they change

Residency = dict[Tier, ShardedSet]


def invariants(system: System) -> list[str]:
    """Descriptions of the violated invariants. Safe under load, where only each actor alone is
    checked. The loop stands still until it returns (see docs/health.md)."""
    return finish(check_steps(system))


async def invariants_in_slices(system: System) -> list[str]:
    """`invariants` in slices of less than two milliseconds, with other tasks in between."""
    found: list[str] = await in_slices(check_steps(system))
    return found


async def in_slices(steps: Sliced[T] | Iterator[None]) -> T:
    """Take steps until SLICE_S is over, let other tasks run, and go on. Returns their result."""
    until = now() + SLICE_S
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if now() >= until:
            await asyncio.sleep(0)
            until = now() + SLICE_S


def check_steps(system: System) -> Sliced[list[str]]:
    """Run every check in steps. Returns descriptions of the violations."""
    supervisor = system.supervisor
    violated = [
        f"{one.name}: switched off after too many failures, the last {one.cause}"
        for one in supervisor.switched_off.values()
    ]
    if supervisor.failed is not None:
        cause = described(supervisor.failed)
        return [*violated, f"{supervisor.failed_actor}: the cache has failed: {cause}"]
    for actor in supervisor.actors():
        yield from _one_actor(actor, violated)
    if not system.in_flight.count:
        yield from _between_actors(system, violated)
    return violated


def _one_actor(actor: Actor, violated: list[str]) -> Iterator[None]:
    turns = actor.turns
    try:
        yield from actor.check_steps()
    except (AssertionError, RuntimeError) as error:
        found = str(error)
        if actor.turns != turns:
            try:
                actor.check()
                return
            except (AssertionError, RuntimeError) as again:
                found = str(again)
        violated.append(f"{actor.ref.name}: {found}")


def _between_actors(system: System, violated: list[str]) -> Iterator[None]:
    """Compare the actors of an idle system."""
    before, found = _events(system), list[str]()
    for _ in _comparisons(system, found):
        yield
        if _events(system) != before:
            return
    violated += found


def _events(system: System) -> tuple[int, ...]:
    """Messages, jobs and turns so far: nothing has happened between two equal values."""
    return (system.in_flight.begun, *(actor.turns for actor in system.supervisor.actors()))


def _comparisons(system: System, found: list[str]) -> Iterator[None]:
    for actor in system.supervisor.actors():
        channel = actor.ref.channel.statistics()
        if queued := channel.queued + channel.control:
            found.append(f"{actor.ref.name}: {queued} messages queued, and no work in flight")
    index, evictor = system.index_actor, system.evictor_actor
    in_flight = index.index_statistics()
    if in_flight.loads_in_flight or in_flight.offloads_in_flight or in_flight.saves_in_flight:
        found.append("prefix_index: an operation is in flight, and no actor works on it")
    if not in_flight.leases and not in_flight.waiting:
        found += _unused(in_flight)
    found += _unfinished(system)
    if system.ranks is not None and (open_ := sum(r.in_flight for r in system.ranks.statistics())):
        found.append(f"ranks: {open_} operations without an answer, and no work in flight")
    if slots := evictor.host.on_device:
        found.append(
            f"cpu_evictor: {slots} slots wait for a DropHostCopies, and no message is in flight"
        )
    yield
    where: Residency = {}
    yield from residency_steps(system, where)  # its first step makes thousands of small tables
    if evictor.exclusive and not index.leases:
        both = 0
        for page in pages(where[Tier.DEVICE]):
            both += sum(
                key in where[Tier.HOST] and not evictor.host.blocks[key].prefetched for key in page
            )  # prefetched blocks may be on both
            yield
        if both:
            found.append(
                f"{both} blocks are on the device and on the host, and the tiers are exclusive"
            )
    stale: set[bytes] = set()
    for nodes in listing(system):
        stale.update(key for key, state in nodes if state & HOST and key not in where[Tier.HOST])
        yield
    if stale:
        found.append(
            f"prefix_index: {len(stale)} blocks have a hint to the host, and are not there"
        )
    yield from _sinks(system, where, found)
    yield from free(where)


def _unfinished(system: System) -> Iterator[str]:
    """No load is left open, no request waits for blocks that nothing frees, and without requests no
    call to the index."""
    index, evictor = system.index_actor, system.evictor_actor
    if waiting := len(index.queue.waiting):
        yield f"prefix_index: {waiting} requests wait for device blocks, and no work in flight"
    if loading := len(index.index.loading):
        yield f"prefix_index: {loading} blocks are loading, and no work in flight"
    if loads := len(evictor.memory.loads):
        yield f"cpu_evictor: {loads} loads have not ended, and no work in flight"
    asks, held = index.ref.open_asks, len(index.queue.held)
    if asks and not (held or index.leases or index.index_statistics().waiting):
        yield f"prefix_index: {asks} calls have no answer, and there is no request"


def _unused(index: IndexStatistics) -> Iterator[str]:
    """Without leases every device block is free, evictable or pinned."""
    if index.nodes_referenced != index.pinned:
        yield f"prefix_index: {index.nodes_referenced} blocks are referenced, and there is no lease"
    if index.blocks_free + index.evictable + index.pinned != index.blocks_total:
        yield (
            f"prefix_index: {index.blocks_free} free and {index.evictable} evictable of "
            f"{index.blocks_total} blocks, and there is no lease"
        )


def _sinks(system: System, where: Residency, found: list[str]) -> Iterator[None]:
    sinks = system.notifier_actor.sinks
    for sink in sinks.statistics():
        if sink.pending or sink.in_flight:
            continue
        differing = yield from sinks.divergence_steps(where, (sink.name,))
        if differing:
            found.append(
                f"flush_notifier: sink {sink.name} differs on {differing} blocks, and has no "
                "pending deliveries"
            )


def residency_steps(system: System, where: Residency) -> Iterator[None]:
    """Fill `where` with the keys that each tier holds, read from the tier's owner."""
    where.update({tier: ShardedSet() for tier in Tier})
    for nodes in listing(system):
        where[Tier.DEVICE].update(key for key, state in nodes if state & DEVICE)
        yield
    yield from _host_keys(system, where[Tier.HOST])
    if system.store is not None:
        for page in pages(system.store.snapshot()):
            where[Tier.STORAGE].update(page)
            yield


def _host_keys(system: System, found: ShardedSet) -> Iterator[None]:
    """Add the keys of the host tier to `found`, in steps. If they change between two steps, the
    collection starts over, and after GATHER_ATTEMPTS changes all of them are copied at once."""
    host = system.evictor_actor.host
    for _ in range(GATHER_ATTEMPTS):
        try:
            for page in pages(host.iter_hashes()):
                found.update(page)
                yield
        except RuntimeError:  # they have changed
            continue
        return
    for page in pages(host.hashes()):
        found.update(page)
        yield


def free(where: Residency) -> Iterator[None]:
    """Free the keys of each tier in steps."""
    for keys in where.values():
        yield from keys.free()


def listing(system: System) -> Iterator[list[tuple[bytes, int]]]:
    """The block tree's nodes as pairs of key and state bits, PAGE_KEYS of them at a time."""
    start = 0
    while start >= 0:
        keys, states, start = system.index_actor.index.tree.listing(start, PAGE_KEYS)
        yield list(zip(split_hashes(keys), states, strict=True))


def pages(keys: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The keys, PAGE_KEYS of them at a time."""
    left = iter(keys)
    while page := list(islice(left, PAGE_KEYS)):
        yield page
