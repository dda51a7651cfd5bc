"""Batches that are written at the same time and have keys in common, in a store that keeps what
hashes are made of."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors.lineage import Lineage
from kvactors.storage.messages import Outcome
from tests.storage.helpers import OK, opened, whole

LATE, NO_SPACE, REFUSED = Outcome.LATE, Outcome.NO_SPACE, Outcome.REFUSED


def lineage(number: int) -> Lineage:
    return Lineage(bytes(32), number.to_bytes(4, "little") * 4)


async def written(store, arena, *batches: tuple[int, ...]) -> list[list[Outcome]]:
    """Write the batches at once. Returns the outcomes of each."""

    async def one(first: int, batch: tuple[int, ...]) -> list[Outcome]:
        kept = [lineage(number) for number in batch]
        slots = range(first, first + len(batch))
        report = await store.write_slots(
            [one.block_hash() for one in kept], arena, slots, lambda: False, kept
        )
        return [Outcome(outcome) for outcome in report.outcomes]

    return await asyncio.gather(*(one(8 * index, batch) for index, batch in enumerate(batches)))


async def test_a_key_evicted_while_it_is_written_may_be_in_another_batch(tmp_path):
    async with opened(tmp_path, 2, block_size=4) as bench:
        outcomes = await written(bench.store, bench.arena, (1,), (2, 3), (1,))
        assert outcomes == [[REFUSED], [OK, OK], [LATE]]
        whole(bench.store)
        assert not bench.store.medium.writes.lineages


async def test_a_key_that_does_not_fit_may_be_in_several_batches(tmp_path):
    async with opened(tmp_path, 1, block_size=4) as bench:
        outcomes = await written(bench.store, bench.arena, (1, 2), (1, 3), (1,))
        assert [one[0] for one in outcomes[:2]] == [REFUSED, REFUSED]
        assert outcomes[2] in ([OK], [NO_SPACE], [REFUSED])
        whole(bench.store)
        assert not bench.store.medium.writes.lineages


@pytest.mark.parametrize("mode", ["exclusive", "inclusive"])
async def test_a_small_store_behind_several_writers_has_no_fault(tmp_path, mode):
    config = kvactors.Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": 4, "default_deadline_s": 60.0},
            "device": {"num_blocks": 16},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
            "host": {"slots": 12, "transit_slots": 16, "mode": mode},
            "storage": {
                "backend": "file",
                "directory": str(tmp_path),
                "capacity_blocks": 4,
                "write_policy": "write_through",
                "writers": 4,
            },
            "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
        }
    )

    async def lane(cache: kvactors.KVCache, seed: int) -> None:
        for number in range(30):
            tokens = [(seed + number * index) % 3 for index in range(8 + (seed * 7 + number) % 16)]
            try:
                async with await cache.acquire(f"{seed}.{number}", tokens) as lease:
                    await lease.wait_ready()
                    await lease.finish(computed_tokens=len(tokens))
            except kvactors.NoRoom:
                await asyncio.sleep(0)

    async with kvactors.open(config) as cache:
        await asyncio.gather(*(lane(cache, seed) for seed in range(6)))
        await cache.wait_flushed(60)
        assert cache.statistics().store.faults == 0
        assert cache.check() == []
        assert cache.count_divergent_blocks() == 0
