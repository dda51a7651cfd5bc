"""Bugs that simulation has found, reduced to small cases. The seeds are of earlier draws."""

from __future__ import annotations

import asyncio
import hashlib

import numpy as np

import kvactors
from kvactors.data_plane.ranks.plane import RankStore
from kvactors.data_plane.ranks.protocol import RankAnswer
from kvactors.flush_notifier.ledger import Ledger
from kvactors.flush_notifier.messages import PathCached
from kvactors.flush_notifier.view import SinkFilter
from kvactors.layout import make_layout
from kvactors.settings import (
    CacheConfig,
    Config,
    DeviceConfig,
    HostConfig,
    LayoutConfig,
    RanksConfig,
    StorageConfig,
)
from kvactors.storage.backend import SlotViews
from kvactors.storage.messages import Outcome
from kvactors.testing.fakes import SimBackend
from kvactors.testing.loop import simulate
from kvactors.types import Reason, Tier, join_hashes
from tests.flush_notifier.helpers import delivered, take
from tests.support.rank_model import RankModel
from tests.support.rank_process import keys_on_rank
from tests.support.sim_pool import SimPool
from tests.support.sim_rank import SimRank


def do(steps) -> None:
    for _ in steps:
        pass


def test_a_cut_batch_does_not_end_the_wait_for_the_tasks_left_out():
    """Seed 0: for a block that differs on two tiers one was sent, and it began to differ again."""
    ledger, tokens, keys = Ledger(1, [SinkFilter(3, node=False, at_finish=False)]), b"", []
    for number in range(8):
        tokens += np.array([number], "<u4").tobytes()
        keys.append(hashlib.sha256(tokens).digest())
    do(
        ledger.announce(
            PathCached(
                bytes(32), tokens, join_hashes(keys), 0, 8, Tier.DEVICE, Reason.COMMIT, bytes(32)
            )
        )
    )
    while ledger.sinks[0].pending:
        delivered(ledger, 0, take(ledger, 0, 100, 1))
    do(ledger.lose(keys[-1], Tier.DEVICE, Reason.DEVICE_EVICTION))
    do(ledger.gain(keys[-1], Tier.HOST, Reason.OFFLOAD))
    mark = ledger.sinks[0].clock
    delivered(ledger, 0, take(ledger, 0, 1, 1))
    assert ledger.sinks[0].pending == 1
    assert ledger.sinks[0].delivered_until < mark


class TwoRanks:
    """Two ranks that answer on the test's command."""

    def __init__(self) -> None:
        self.config = RanksConfig(count=2)
        self.healthy = True
        self.memory_generation = 0
        self.open: list[asyncio.Future[None]] = []

    async def scatter(self, build, arrived=None, *, outcomes, **_how):
        build(1)
        self.open.append(asyncio.get_running_loop().create_future())
        await self.open[-1]
        return [RankAnswer(1, bytes([Outcome.OK]) * outcomes)] * 2


def test_blocks_being_written_when_the_ranks_were_cleared_are_not_held():
    """Seed 716: the ranks emptied their stores behind that write."""

    async def main() -> None:
        group = TwoRanks()
        store = RankStore(group, 64, 1.0, exclusive=False)
        writing = asyncio.ensure_future(
            store.write([bytes([1]) * 32], SlotViews(None, [0]), lambda: False)
        )
        await asyncio.sleep(0)
        clearing = asyncio.ensure_future(store.clear())
        while len(group.open) < 2:
            await asyncio.sleep(0)
        for one in group.open:
            one.set_result(None)
        await asyncio.gather(writing, clearing)
        assert store.keys() == []

    simulate(main)


def test_blocks_that_others_load_are_not_needed_again():
    """Three blocks free, two on their way: enough for a request of five that shares these two."""
    config = Config(
        cache=CacheConfig(block_size=4),
        device=DeviceConfig(num_blocks=6),
        storage=StorageConfig(backend="memory"),
    )
    layout = make_layout(config.layout, 4)

    async def main() -> None:
        slow = SimPool(layout.fingerprint, layout.block_bytes, latency=lambda: 1.0)
        async with (
            kvactors.open(config, backend=slow, inline_copies=True) as cache,
            await cache.acquire("a", list(range(9))),
        ):
            lease = await cache.acquire("b", list(range(17)))
            assert len(lease.block_table) == 5
            lease.abandon()

    simulate(main)


def test_writes_that_wait_when_a_rank_loses_its_memory_are_refused():
    """Seed 30139: four writes, of which a writer does two at a time. The rank fails during them and
    is back at once."""
    config = Config(
        cache=CacheConfig(block_size=4),
        device=DeviceConfig(num_blocks=8),
        host=HostConfig(slots=8, transit_slots=8),
        layout=LayoutConfig(
            num_layers=2, num_kv_heads=2, head_dim=4, dtype="uint8", tensor_parallel=2
        ),
        storage=StorageConfig(backend="memory", write_policy="write_through", writers=1),
        ranks=RanksConfig(2, "memory://bugs", timeout_s=5.0),
    )
    layout = make_layout(config.layout, 4)

    async def main() -> None:
        stores = [
            SimBackend(layout.fingerprint, layout.block_bytes, latency=lambda: 0.5)
            for _ in range(2)
        ]
        ranks = [
            SimRank(config, number, store=stores[number], latency=lambda: 0.001)
            for number in range(2)
        ]
        model = RankModel(layout, lambda: [rank.device for rank in ranks])
        for rank in ranks:
            await rank.start()
        async with kvactors.open(config, inline_copies=True) as cache:
            for number in range(4):
                lease = await cache.acquire("a", list(range(100 * number, 100 * number + 5)))
                await lease.wait_ready()
                await model.fill(lease.block_table[:1], lease.hashes(0, 1))
                await lease.commit(4)
                await lease.finish()
            await asyncio.sleep(0.1)
            await ranks[0].stop()
            await ranks[0].start()
            await cache.wait_idle(60.0)
            for number, store in enumerate(stores):
                wrong = [
                    key
                    for key, (data, _) in store.objects.items()
                    if data != model.bytes_of(keys_on_rank(key, number))
                ]
                assert wrong == []
        for rank in ranks:
            await rank.close()

    simulate(main)
