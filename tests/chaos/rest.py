"""A small cache for chaos, and its invariants at rest after any faults."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvactors.cache import KVCache
from kvactors.opening import open_cache
from kvactors.settings import Config
from kvactors.storage import attempts
from kvactors.testing.sim import problems_at_rest
from kvactors.types import Tier
from tests.chaos.load import Load
from tests.chaos.record import Setting, Tally
from tests.support.announced import announceable
from tests.support.jsonl import replay_jsonl

SETTLE = 45.0
"""Seconds in which a cache must come to rest."""

BREAKER = 0.3
"""Seconds that an open circuit lasts here, so that a round sees the store used again."""

TIERS = ["device", "host", "storage"]
MEMORY: dict[str, Any] = {"kind": "memory", "tiers": TIERS}


def jsonl(path: Path) -> dict[str, Any]:
    """The settings of a file of JSON lines."""
    return {"kind": "jsonl", "tiers": TIERS, "path": str(path)}


def settings(store: Path, *sinks: dict[str, Any], **storage: Any) -> dict[str, Any]:
    """A cache far smaller than what the load asks for, over a file store, so that blocks move all
    the time."""
    return {
        "cache": {"model": "m", "block_size": 16, "default_deadline_s": 20.0},
        "device": {"num_blocks": 64},
        "host": {"slots": 24, "transit_slots": 64},
        "layout": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
        "storage": {
            "backend": "file",
            "directory": str(store),
            "capacity_blocks": 1000,
            "write_policy": "write_through",
            "free_space_floor": 0,
            **storage,
        },
        "flush": {"sinks": list(sinks or [MEMORY]), "retry_max_s": 0.5},
    }


def varied(mapping: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """The same with a write policy and a mode of the host tier drawn by lot."""
    policy = setting.rng.choice(["write_through", "write_back"])
    mode = setting.rng.choice(["exclusive", "inclusive"])
    storage, host = (
        {**mapping["storage"], "write_policy": policy},
        {**mapping["host"], "mode": mode},
    )
    return {**mapping, "storage": storage, "host": host}


@asynccontextmanager
async def loaded(
    mapping: dict[str, Any], setting: Setting, tally: Tally
) -> AsyncIterator[tuple[KVCache, Load]]:
    """An open cache and clients for it, in this process."""
    attempts.PAUSE_S = BREAKER
    async with open_cache(Config.from_mapping(mapping)) as cache:
        yield cache, Load(cache, tally, setting.seed)


async def at_rest(cache: KVCache, tally: Tally, seconds: float = SETTLE) -> None:
    """A violation for each thing that is wrong with a cache that nothing uses any more."""
    for what in await problems_at_rest(cache, seconds):
        tally.complain(f"at rest: {what}")
    supervisor = cache.statistics().supervisor
    if supervisor.failures:
        tally.complain(f"actors failed: {supervisor}")


def named(cache: KVCache) -> dict[Tier, set[bytes]]:
    """The blocks that a sink without a filter must have: see `announceable`."""
    return announceable(cache.system)


def compare_lines(path: Path, truth: dict[Tier, set[bytes]], tally: Tally) -> None:
    """A file of JSON lines must match the tiers at rest."""
    view = replay_jsonl(path)
    for tier in Tier:
        differing = len(view[tier] ^ truth.get(tier, set()))
        if differing:
            tally.complain(f"the file of JSON lines differs from {tier.name} on {differing} blocks")
