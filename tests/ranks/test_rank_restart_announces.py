"""With ranks in other processes, stored blocks are announced after a restart: those that the stores
of all ranks hold."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager

from msgspec.structs import replace

import kvactors
from kvactors.data_plane.ranks.plane import proved
from kvactors.data_plane.ranks.worker import serve_rank
from kvactors.device.host import HostDevice
from kvactors.flush_notifier.messages import PathPart
from kvactors.layout import make_layout
from kvactors.storage import actors
from kvactors.storage.file.table import lineage_in
from kvactors.types import Tier, split_hashes

BLOCK = 4


def config(folder) -> kvactors.Config:
    return kvactors.Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": BLOCK},
            "device": {"num_blocks": 32},
            "host": {"slots": 16, "transit_slots": 32},
            "layout": {
                "num_layers": 1,
                "num_kv_heads": 2,
                "head_dim": 4,
                "dtype": "uint8",
                "tensor_parallel": 2,
            },
            "storage": {
                "backend": "file",
                "directory": str(folder),
                "capacity_blocks": 60,
                "write_policy": "write_through",
            },
            "ranks": {"count": 2, "endpoint": "memory://announces", "timeout_s": 20.0},
            "flush": {
                "sinks": [
                    {"kind": "memory", "name": "index", "tiers": ["device", "host", "storage"]}
                ]
            },
        }
    )


@asynccontextmanager
async def opened(folder):
    """A leader and two ranks with separate stores."""
    settings = config(folder)
    layout = make_layout(settings.layout, BLOCK)
    serving = [
        asyncio.create_task(
            serve_rank(
                "memory://announces", HostDevice(layout, 32), rank=i, ranks=2, config=settings
            )
        )
        for i in range(2)
    ]
    try:
        async with kvactors.open(settings) as cache:
            yield cache
    finally:
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)


async def request(cache, seed: int) -> list[bytes]:
    lease = await cache.acquire(str(seed), [7] * BLOCK + [seed] * (3 * BLOCK) + [1])
    await lease.wait_ready()
    keys = split_hashes(lease.hashes(0, 4))
    await lease.commit(4 * BLOCK + 1)
    await lease.finish()
    await cache.wait_idle()
    return [*keys, lease.hits]


def announced(cache) -> set[bytes]:
    return set(cache.sinks["index"].view()[Tier.STORAGE])


async def test_the_leader_announces_the_blocks_that_all_ranks_hold(tmp_path, monkeypatch):
    monkeypatch.setattr(actors, "PATH_PAGE", 3)
    async with opened(tmp_path) as cache:
        paths = [(await request(cache, seed))[:4] for seed in range(10, 15)]
        await cache.wait_flushed()
        before = announced(cache)
        assert len(before) == 1 + 5 * 3
    lost = paths[2][2]
    for table in tmp_path.rglob("rank-1-of-2/*/table"):  # rank 1 loses its share of a block
        raw = table.read_bytes()
        assert lost in raw
        table.write_bytes(raw.replace(lost, bytes(32)))
    async with opened(tmp_path) as cache:
        await cache.wait_flushed()
        assert announced(cache) == before - {lost, paths[2][3]}
        assert cache.check() == []
        *_, hits = await request(cache, 10)
        assert hits.storage == 4
        *_, hits = await request(cache, 12)
        assert hits.storage + hits.device == 2


async def test_the_blocks_of_a_rank_whose_folder_was_deleted_are_reported_gone(tmp_path):
    async with opened(tmp_path) as cache:
        for seed in range(10, 15):
            await request(cache, seed)
        await cache.wait_flushed()
        before = announced(cache)
        await cache.clear()
        (folder,) = tmp_path.glob("*/*/rank-1-of-2")
        shutil.rmtree(folder)
        await request(cache, 20)
        await request(cache, 21)
        await cache.wait_flushed()
        assert len(before) == 1 + 5 * 3
        assert len(before & announced(cache)) <= 1, "the first block, which was written again"
        assert cache.count_divergent_blocks() == 0


def test_a_part_of_a_path_is_proved_by_its_keys():
    first = kvactors.identity.Lineage(bytes(32), b"t" * 8, b"x")
    second = kvactors.identity.Lineage(first.block_hash(), b"u" * 8)
    part = PathPart(
        bytes(32),
        first.block_hash() + second.block_hash(),
        b"t" * 8 + b"u" * 8,
        extra_keys=((0, b"x"),),
    )
    assert proved(part)
    for wrong in (
        part._replace(tokens=b"t" * 16),
        part._replace(extra_keys=()),
        part._replace(parent=b"p" * 32),
        part._replace(hashes=second.block_hash() + first.block_hash()),
        part._replace(hashes=b""),
        part._replace(tokens=b"t" * 7),
    ):
        assert not proved(wrong)


async def test_paths_of_a_rank_that_are_not_proved_are_left_out(tmp_path, monkeypatch):
    async with opened(tmp_path) as cache:
        await request(cache, 10)
    monkeypatch.setattr("kvactors.storage.file.table.lineage_in", forged)
    async with opened(tmp_path) as cache:
        await cache.wait_flushed()
        assert announced(cache) == set()
        *_, hits = await request(cache, 10)
        assert hits.storage == 4


def forged(fields, key):
    found = lineage_in(fields, key)
    return found and replace(found, tokens=bytes(4 * BLOCK))
