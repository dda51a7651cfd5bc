"""What must hold of a whole system. Every actor looks at its own state at any time; what two of them say of one fact is compared at rest."""

from __future__ import annotations

from collections.abc import Iterator

from kvactors.actor.supervisor import brief
from kvactors.native import HOST
from kvactors.observe.statistics import residency
from kvactors.system import System
from kvactors.units import Tier, split_keys


def invariants(system: System) -> list[str]:
    """What is violated, in words. Safe to ask of a cache under load; then only what one actor can see by itself is looked at."""
    violated = [
        f"{one.name}: switched off after too many failures, the last {one.cause}"
        for one in system.supervisor.switched_off.values()
    ]
    if system.supervisor.failed is not None:
        return [*violated, f"{system.supervisor.failed_actor}: the cache has failed: {brief(system.supervisor.failed)}"]
    for actor in system.supervisor.actors():
        try:
            actor.check()
        except (AssertionError, RuntimeError) as error:
            violated.append(f"{actor.ref.name}: {error}")
    if not system.activity.count:
        violated += _between_actors(system)
    return violated


def _between_actors(system: System) -> Iterator[str]:
    """At rest: no message is left, tiers do not contradict each other, and every sink that nothing is owed to believes what is true."""
    for actor in system.supervisor.actors():
        channel = actor.ref.channel.statistics()
        if channel.queued or channel.control:
            yield f"{actor.ref.name}: {channel.queued + channel.control} messages queued, and nothing is under way"
    index, evictor = system.index_actor, system.evictor_actor
    in_flight = index.index_statistics()
    if in_flight.loads_in_flight or in_flight.offloads_in_flight or in_flight.saves_in_flight:
        yield "prefix_index: an operation is in flight, and nobody is under way with it"
    if evictor.host.handed():
        yield f"cpu_evictor: {evictor.host.handed()} slots wait for a Discard, and no message is under way"
    where = residency(system)
    if evictor.exclusive and not index.leases:
        both = where[Tier.DEVICE] & where[Tier.HOST]
        both = {key for key in both if not evictor.host.entries[key].hinted}  # a prefetch may come after the block itself
        if both:
            yield f"{len(both)} blocks are on the device and on the host, and the tiers are exclusive"
    stale = _host_hints(system) - where[Tier.HOST]
    if stale:
        yield f"prefix_index: {len(stale)} blocks are thought to be on the host, and are not"
    yield from _sinks(system, where)


def _host_hints(system: System) -> set[bytes]:
    """Names that the index thinks the host has."""
    found: set[bytes] = set()
    for _, _, keys, states in system.index_actor.index.tree.paths():
        found.update(key for key, state in zip(split_keys(keys), states, strict=True) if state & HOST)
    return found


def _sinks(system: System, where: dict[Tier, set[bytes]]) -> Iterator[str]:
    notifier = system.notifier_actor
    for sink in notifier.flush_statistics():
        if not sink.pending and not sink.in_flight:
            differing = notifier.divergence(where, (sink.name,))
            if differing:
                yield f"flush_notifier: sink {sink.name} differs on {differing} blocks, and nothing is owed to it"
