"""The check of a cache at rest, when no request uses it."""

from __future__ import annotations

from kvactors.cache import KVCache
from kvactors.errors import DeadlineExceeded


async def problems_at_rest(cache: KVCache, deadline: float = 30.0) -> list[str]:
    """Wait until a cache without requests is idle and its sinks are up to date, then check it.

    Args:
        cache: open, and without requests.
        deadline: seconds in which it must become idle.

    Returns:
        One text per problem: leases that were not finished, waiting requests, violated invariants
        (see `KVCache.check`), sinks that differ from the tiers.

    Raises:
        KVActorsError: the cache has failed or is closed.
    """
    try:
        await cache.wait_flushed(deadline)
    except DeadlineExceeded as error:
        return [f"the cache does not become idle: {error}"]
    core = cache.system.index_actor.core
    problems = [f"the lease of {lease.request_id!r} was never finished" for lease in core.leases]
    if waiting := core.statistics().waiting:
        problems.append(f"{waiting} requests still wait for device blocks")
    problems += cache.check()
    if differing := cache.count_divergent_blocks():
        problems.append(f"a sink's view differs from the tiers in {differing} blocks")
    return problems
