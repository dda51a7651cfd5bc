"""A cache whose ranks are real worker processes, an engine that uses it, and faults.

Limits here do not measure speed: they only end a hang.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

import kvactors
from kvactors.scenario.engine import Engine
from kvactors.scenario.report import Totals
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
from tests.support.rank_model import ProcessModel, WorkerGone
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


class Clients:
    """Clients of the reference engine, which checks every block on every rank. broken: requests
    that a lost rank or a deadline ended."""

    def __init__(self, cache, ranks, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.totals = Totals()
        self.broken = 0
        self._engine = Engine(
            cache, self.totals, ProcessModel(ranks), thorough=True, on_wrong=self._judge
        )

    @property
    def served(self) -> int:
        """Requests served to their end."""
        return self.totals.finished

    @property
    def wrong(self) -> int:
        """Blocks with other bytes, and other errors."""
        return self.totals.corrupt_blocks_served + len(self.totals.errors)

    @property
    def hits(self) -> list[int]:
        """Blocks found, by tier."""
        return [self.totals.device, self.totals.host, self.totals.storage]

    def prompt(self) -> list[int]:
        family = self.rng.randrange(12)
        length = self.rng.randrange(1, 7)
        return [family * 1000 + i for i in range(length * BLOCK + self.rng.randrange(BLOCK))]

    async def serve(self, prompt: list[int]) -> None:
        """One request. A lost rank may end it, any other error is raised."""
        try:
            await self._engine.serve(f"r{self.served}", prompt)
        except (WorkerGone, kvactors.RankLost, kvactors.LeaseEnded):
            self.broken += 1  # the worker is gone: the engine takes the request up again
        except (kvactors.NoRoom, kvactors.DeadlineExceeded):
            self.broken += 1

    async def _judge(self, request, _positions, _when) -> None:
        """Blocks without their bytes are wrong, unless the cache reports that a rank's memory was
        lost."""
        with anyio.move_on_after(10.0):
            while True:
                await asyncio.sleep(0.01)
                await request.lease.commit(request.lease.cached_tokens)  # RankLost ends the request

    async def run(self, requests: int) -> None:
        """So many requests of three clients."""
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                await self.serve(self.prompt())
                await asyncio.sleep(0)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(client)


async def at_rest(cache) -> None:
    """No work is in flight, and nothing is left over or wrong."""
    assert await problems_at_rest(cache, HANG) == []


async def healthy(cache) -> None:
    """All ranks are admitted and answer."""
    with anyio.fail_after(HANG):
        while not cache.system.ranks.healthy:
            await asyncio.sleep(0.005)
