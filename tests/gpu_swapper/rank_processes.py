"""A cache whose ranks are real worker processes, and requests.

Limits here do not measure speed: they only end a hang.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

import kvactors
from kvactors.settings import (
    CacheConfig,
    Config,
    DeviceConfig,
    HostConfig,
    LayoutConfig,
    StorageConfig,
)
from kvactors.settings.ranks import RanksConfig
from kvactors.testing.sim import problems_at_rest
from tests.support.rank_model import ProcessModel, RankLoad
from tests.support.rank_process import RankProcess

BLOCK = 8

HANG = 200.0
"""Seconds after which a wait counts as a hang, on any machine."""

PATIENT, IMPATIENT = 60.0, 0.3
"""`ranks.timeout_s` where no rank is to fall silent, and where ranks are to fall silent soon."""


def settings(tmp_path: Path, count: int = 2, **over) -> Config:
    """Small tiers, so that everything moves: 24 device blocks, 24 host slots, a file store for each
    rank."""
    parts = {
        "cache": CacheConfig(model="m", block_size=BLOCK, default_deadline_s=10.0),
        "device": DeviceConfig(num_blocks=24),
        "host": HostConfig(slots=24, transit_slots=32),
        "layout": LayoutConfig(num_layers=2, num_kv_heads=4, head_dim=32, tensor_parallel=count),
        "storage": StorageConfig(
            backend="file", directory=str(tmp_path / "store"), capacity_blocks=200
        ),
        "ranks": RanksConfig(
            count, f"unix://{tmp_path}/ranks", timeout_s=PATIENT, startup_timeout_s=HANG
        ),
    }
    return Config(**{**parts, **over})


@asynccontextmanager
async def led(config: Config):
    """The cache and its ranks' processes. All of them end here."""
    ranks = [RankProcess(config, rank) for rank in range(config.ranks.count)]
    try:
        for rank in ranks:
            await rank.start()
        async with kvactors.open(config) as cache:
            yield cache, ranks
    finally:
        for rank in ranks:
            await rank.kill()


def load(cache, ranks) -> RankLoad:
    return RankLoad(cache, ProcessModel(ranks))


async def at_rest(cache) -> None:
    """No work is in flight, and nothing is left over or wrong."""
    assert await problems_at_rest(cache, HANG) == []


async def healthy(cache) -> None:
    """All ranks are admitted and answer."""
    with anyio.fail_after(HANG):
        while not cache.system.ranks.healthy:
            await asyncio.sleep(0.005)
