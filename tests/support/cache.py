"""A small cache and a serving loop's few moves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

import kvactors
from kvactors import Config, KVCache, Lease
from kvactors.flush_notifier.sinks import Sink
from kvactors.scenario.engine import Engine
from kvactors.scenario.report import Totals
from kvactors.testing.sim import problems_at_rest

Table = Mapping[str, Any]

BLOCK = 4
TINY = {"kind": "gqa", "num_layers": 2, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"}


def settings(
    *,
    device: int = 8,
    host: Table | None = None,
    storage: Table | None = None,
    sinks: Iterable[Table] = ({"kind": "memory", "tiers": ["device", "host", "storage"]},),
    **tables: Any,
) -> Config:
    cache = {
        "model": "m",
        "block_size": BLOCK,
        "default_deadline_s": 5.0,
        **tables.pop("cache", {}),
    }
    return kvactors.Config.from_mapping(
        {
            "cache": cache,
            "device": {"num_blocks": device},
            "layout": TINY,
            "host": host or {},
            "storage": storage or {},
            "flush": {"sinks": list(sinks), **tables.pop("flush", {})},
            **tables,
        }
    )


def prompt(seed: int, blocks: int, *, tail: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(t) for t in rng.integers(0, 2**32, blocks * BLOCK + tail)]


@asynccontextmanager
async def opened(
    *,
    inline: bool = False,
    given: Sequence[Sink] = (),
    clock: Callable[[], float] | None = None,
    **kwargs: Any,
) -> AsyncIterator[KVCache]:
    """A cache that is checked when the block ends: nothing referenced, pools add up, every sink's
    view equals the tiers. given: sinks beside those of the settings."""
    config = settings(**kwargs)
    async with kvactors.open(config, sinks=given, inline_copies=inline, clock=clock) as cache:
        yield cache
        assert await problems_at_rest(cache, 10) == []


async def serve(
    cache: KVCache, name: str, tokens: Any, *, verify: bool = True, **options: Any
) -> Lease:
    """Serve one request of the reference engine, all of whose blocks must be right.

    Args:
        cache: the cache.
        name: of the request.
        tokens: its prompt.
        verify: False if committed blocks were not computed.
        options: of `Engine.serve`, and those of `KVCache.acquire`.

    Returns:
        Its lease, ended.
    """
    totals = Totals()
    lease = await Engine(cache, totals, thorough=True).serve(name, tokens, **options)
    assert totals.errors == []
    assert not verify or totals.corrupt_blocks_served == 0
    assert sum(lease.hits) == lease.cached_tokens // cache.block_size
    return lease
