"""Ranks whose stores are a pool of many nodes: blocks written by one leader's ranks are found by
another's, and no leader announces them as its own."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors.data_plane.ranks.plane import make_ranks_plane
from kvactors.errors import StoreUnsupported
from kvactors.layout import make_layout
from kvactors.settings import (
    CacheConfig,
    Config,
    DeviceConfig,
    HostConfig,
    LayoutConfig,
    StorageConfig,
)
from kvactors.settings.mooncake import MooncakeConfig
from kvactors.settings.ranks import RanksConfig
from kvactors.settings.tables import SHARED
from kvactors.storage.backend import ReadReport
from kvactors.storage.messages import Outcome
from kvactors.testing.loop import simulate
from tests.support.rank_model import RankModel
from tests.support.sim_pool import SimPool
from tests.support.sim_rank import SimRank

BLOCK, BLOCKS = 4, 5
CONFIG = Config(
    cache=CacheConfig(model="m", block_size=BLOCK),
    device=DeviceConfig(num_blocks=16),
    host=HostConfig(slots=8, transit_slots=8),
    layout=LayoutConfig(num_layers=2, num_kv_heads=2, head_dim=4, dtype="uint8", tensor_parallel=2),
    storage=StorageConfig(
        backend="mooncake",
        write_policy="write_through",
        mooncake=MooncakeConfig(master_server_address="of.nobody:1"),
    ),
    ranks=RanksConfig(2, "memory://pool", timeout_s=5.0),
)
PROMPT = list(range(BLOCK * BLOCKS + 1))


async def life(stores, without_checksum=lambda _: None):
    """One leader with two ranks serves the prompt. Returns the blocks it found in storage, how
    many were wrong, and the keys. without_checksum: called with that statistic."""
    layout = make_layout(CONFIG.layout, BLOCK)
    ranks = [
        SimRank(CONFIG, number, store=store, latency=lambda: 0.001)
        for number, store in enumerate(stores)
    ]
    model = RankModel(layout, lambda: [rank.device for rank in ranks])
    for rank in ranks:
        await rank.start()
    async with kvactors.open(CONFIG, inline_copies=True) as cache:
        async with await cache.acquire("a", PROMPT) as lease:
            await lease.wait_ready()
            cached, keys = lease.cached_tokens // BLOCK, lease.hashes(0, BLOCKS)
            wrong = await model.check(lease.block_table[:cached], keys[: 32 * cached])
            await model.fill(lease.block_table[cached:BLOCKS], keys[32 * cached :])
            await lease.commit(len(PROMPT))
            hits = lease.hits.storage
        await cache.wait_idle()
        assert cache.check() == []
        without_checksum(cache.statistics().store.without_checksum)
        assert cache.system.backend.keys() == []
        with pytest.raises(StoreUnsupported, match="not in reach of this process"):
            await cache.system.backend.read([], [], lambda: False)
    for rank in ranks:
        await rank.close()
    return hits, len(wrong), [keys[32 * i : 32 * i + 32] for i in range(BLOCKS)]


def pools():
    layout = make_layout(CONFIG.layout, BLOCK)
    return [
        SimPool(layout.fingerprint, layout.block_bytes, latency=lambda: 0.001) for _ in range(2)
    ]


def test_another_leader_finds_the_blocks_that_the_first_ones_ranks_wrote():
    async def main() -> None:
        stores = pools()
        assert (await life(stores))[:2] == (0, 0)
        assert (await life(stores))[:2] == (BLOCKS, 0)

    simulate(main)


def test_the_rank_that_has_least_decides():
    async def main() -> None:
        stores = pools()
        _, _, keys = await life(stores)
        await stores[1].remove([keys[2]])
        assert (await life(stores))[:2] == (2, 0)
        await asyncio.sleep(0)

    simulate(main)


def test_a_chunk_of_a_prompt_takes_blocks_for_all_that_a_pool_may_hold():
    """Only a query can tell."""

    async def main() -> None:
        ranks = [SimRank(CONFIG, number, store=store) for number, store in enumerate(pools())]
        for rank in ranks:
            await rank.start()
        async with kvactors.open(CONFIG, inline_copies=True) as cache:
            lease = await cache.acquire("a", PROMPT, chunk_tokens=1)
            assert len(lease.block_table) == BLOCKS + 1
            await lease.finish()
        for rank in ranks:
            await rank.close()

    simulate(main)


class Unverified(SimPool):
    """Its objects have no checksums, which this node wants."""

    async def read(self, keys, views, expired):
        self.counters.without_checksum += len(keys)
        return ReadReport(bytes([Outcome.MISS]) * len(keys), [])


def test_objects_without_checksums_are_counted_by_the_leader():
    """A block counts once, although each rank misses its part."""

    async def main() -> None:
        layout = make_layout(CONFIG.layout, BLOCK)
        stores = [
            Unverified(layout.fingerprint, layout.block_bytes, latency=lambda: 0.001)
            for _ in range(2)
        ]
        assert (await life(stores))[0] == 0
        seen = []
        assert (await life(stores, seen.append))[:2] == (0, 0)
        assert seen == [BLOCKS]
        assert (await life(stores, seen.append))[:2] == (0, 0)
        assert seen == [BLOCKS, BLOCKS], "a rank tells of each miss once"

    simulate(main)


@pytest.mark.parametrize("backend", SHARED)
def test_ranks_of_a_shared_store_list_no_keys(backend):
    storage = StorageConfig(backend=backend)
    plane = make_ranks_plane(CONFIG, storage, make_layout(CONFIG.layout, BLOCK))
    assert plane.store is not None
    assert plane.store.inner.shared
