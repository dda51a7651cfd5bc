"""A cache and its ranks on the loop of virtual time, and requests of engines."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import anyio

import kvactors
from kvactors.device.host import HostDevice
from kvactors.layout import make_layout
from kvactors.settings import (
    CacheConfig,
    Config,
    DeviceConfig,
    HostConfig,
    LayoutConfig,
    StorageConfig,
)
from kvactors.settings.ranks import RanksConfig
from kvactors.storage.memory import MemoryBackend
from kvactors.testing.sim import problems_at_rest
from tests.support.rank_model import RankLoad, RankModel
from tests.support.rank_process import keys_on_rank
from tests.support.sim_rank import SimRank

BLOCK = 4
ENDPOINT = "memory://leader"


def settings(count: int = 2, **over) -> Config:
    """Small tiers, so that everything moves. The store is the ranks' own: "file" only means that
    there is one."""
    parts = {
        "cache": CacheConfig(model="m", block_size=BLOCK, default_deadline_s=10.0),
        "device": DeviceConfig(num_blocks=16),
        "host": HostConfig(slots=16, transit_slots=16),
        "layout": LayoutConfig(
            num_layers=3, num_kv_heads=count, head_dim=4, dtype="uint8", tensor_parallel=count
        ),
        "storage": StorageConfig(backend="none", write_policy="none"),
        "ranks": RanksConfig(count, ENDPOINT, timeout_s=0.3, startup_timeout_s=30.0),
    }
    return Config(**{**parts, **over})


def stored(**options) -> StorageConfig:
    return StorageConfig(backend="file", directory="unused", capacity_blocks=60, **options)


class Disk(MemoryBackend):
    """A store whose objects outlive the process."""

    async def close(self) -> None:
        pass


class Rank(SimRank):
    """One rank with a plain device. Its store outlives a restart, its device and arena do not."""

    def __init__(self, config: Config, number: int) -> None:
        self.layout = make_layout(config.layout, BLOCK)
        store = None
        if config.storage.backend != "none":
            capacity = config.storage.capacity_blocks or 0
            store = Disk(self.layout.fingerprint, self.layout.block_bytes, capacity)
        super().__init__(config, number, store=store)

    def _new_device(self) -> HostDevice:
        return HostDevice(self.layout, self.config.device.num_blocks)


@asynccontextmanager
async def led(config: Config):
    """The cache and its ranks."""
    ranks = [Rank(config, number) for number in range(config.ranks.count)]
    try:
        for rank in ranks:
            await rank.start()
        async with kvactors.open(config, inline_copies=True) as cache:
            yield cache, ranks
    finally:
        for rank in ranks:
            await rank.close()


def prompt(family: int, blocks: int, more: int = 1) -> list[int]:
    return [family * 1000 + i for i in range(blocks * BLOCK + more)]


def compute(lease, ranks, first: int, full: int) -> None:
    """Compute blocks [first, full) on every rank, as an engine does."""
    keys = lease.hashes(first, full)
    for rank in ranks:
        rank.device.fill(lease.block_table[first:full], keys_on_rank(keys, rank.rank))


def wrong(lease, ranks, count: int) -> list[int]:
    """Positions of cached blocks that do not hold what their names stand for."""
    keys = lease.hashes(0, count)
    return [
        j
        for rank in ranks
        for j in rank.device.check(lease.block_table[:count], keys_on_rank(keys, rank.rank))
    ]


def load(cache, ranks) -> RankLoad:
    """Requests of an engine, which computes nothing without all of its workers."""
    return RankLoad(
        cache, RankModel(ranks[0].layout, lambda: [rank.serving and rank.device for rank in ranks])
    )


async def serve(cache, ranks, tokens, **options):
    """One request from acquire to its end. Returns the lease, and the blocks with other bytes."""
    async with await cache.acquire("r", tokens, **options) as lease:
        await lease.wait_ready()
        cached, full = lease.cached_tokens // BLOCK, len(tokens) // BLOCK
        bad = wrong(lease, ranks, cached)
        compute(lease, ranks, cached, full)
        await lease.commit(full * BLOCK)
    return lease, bad


async def all_there(cache) -> None:
    with anyio.fail_after(60):
        while not cache.system.ranks.healthy:
            await asyncio.sleep(0.01)


async def at_rest(cache) -> None:
    """No work is in flight, and nothing is left over or wrong."""
    assert await problems_at_rest(cache, 60.0) == []
