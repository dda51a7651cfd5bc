"""Many requests at once in a cache too small for them: tokens reported as cached are cached, while
other requests load, wait and are evicted."""

from __future__ import annotations

import random

import anyio
import pytest

import kvactors
from kvactors.settings import CacheConfig, Config, DeviceConfig, HostConfig, StorageConfig
from kvactors.testing.loop import simulate

BLOCK = 8


@pytest.mark.parametrize("mode", ["exclusive", "inclusive"])
@pytest.mark.parametrize("seed", range(12))
def test_blocks_reported_as_cached_hold_their_bytes(seed, mode):
    config = Config(
        cache=CacheConfig(block_size=BLOCK),
        device=DeviceConfig(num_blocks=24),
        host=HostConfig(slots=24, transit_slots=32, mode=mode),
        storage=StorageConfig(backend="memory", capacity_blocks=200, write_policy="write_through"),
    )
    rng = random.Random(seed)

    async def request(cache, number: int) -> None:
        family, length = rng.randrange(12), rng.randrange(BLOCK, 7 * BLOCK)
        prompt = [family * 1000 + i for i in range(length)]
        try:
            lease = await cache.acquire(f"r{number}", prompt)
        except kvactors.NoRoom:
            return
        async with lease:
            try:
                await lease.wait_ready()
            except (
                kvactors.NoRoom
            ):  # a shared load came short, and there was nothing to put in its blocks' place
                return
            cached, full = lease.cached_tokens // BLOCK, length // BLOCK
            assert cached <= full
            keys, table = lease.hashes(0, full), lease.block_table
            assert cache.device.check(table[:cached], keys[: cached * 32]) == []
            await anyio.sleep(rng.random() * 0.01)
            cache.device.fill(table[cached:full], keys[cached * 32 :])
            await lease.commit(full * BLOCK)
            await anyio.sleep(rng.random() * 0.01)

    async def main() -> None:
        async with kvactors.open(config, inline_copies=True) as cache:

            async def client(number: int) -> None:
                for i in range(40):
                    await request(cache, number * 100 + i)

            async with anyio.create_task_group() as tasks:
                for number in range(5):
                    tasks.start_soon(client, number)
            await cache.wait_idle()
            assert cache.check() == []
            statistics = cache.statistics()
            hits = statistics.device_hits + statistics.host_hits + statistics.storage_hits
            assert statistics.host_hits
            assert hits <= statistics.blocks_looked_up

    simulate(main, seed)
