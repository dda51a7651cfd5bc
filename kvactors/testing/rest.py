"""The check of a cache at rest, when no request uses it."""

from __future__ import annotations

from kvactors.actor.clock import now
from kvactors.cache import KVCache
from kvactors.errors import DeadlineExceeded


async def problems_at_rest(cache: KVCache, deadline: float = 30.0) -> list[str]:
    """Wait until a cache without requests is idle and its sinks are up to date, then check it.

    Args:
        cache: open, and without requests.
        deadline: seconds in which it must become idle.

    Returns:
        One text per problem, see `left_over`. An idle cache's invariants include that every sink's
        view equals the tiers.

    Raises:
        KVActorsError: the cache has failed or is closed.
    """
    at = now() + deadline
    try:
        await cache.wait_flushed(deadline)
        while cache.system.in_flight.count:
            # The timer of a pin, or a finaliser, has sent a message in the step of the answer.
            await cache.wait_flushed(max(at - now(), 1e-9))
    except DeadlineExceeded as error:
        return [f"the cache does not become idle: {error}"]
    return left_over(cache)


def left_over(cache: KVCache) -> list[str]:
    """One text per problem of a cache that is idle and has no requests: work in flight, leases that
    were not finished, waiting requests, violated invariants (see `KVCache.check`)."""
    system, core = cache.system, cache.system.index_actor.core
    problems = [f"the lease of {lease.request_id!r} was never finished" for lease in core.leases]
    if waiting := core.statistics().waiting + len(core.held):
        problems.append(f"{waiting} requests still wait")
    if count := system.in_flight.count:
        problems.append(f"{count} messages or jobs are in flight")
    return problems + cache.check()
