"""The memory of RETAIN's tables. A large tier's is brought in when the tier is made, since the first access to a huge
page clears 2 MiB in the turn of an actor. That of a small tier, or of a tree in place of one that was cleared,
is used as it is needed. None of it is left behind: the allocator keeps what it has freed between other pieces."""

from __future__ import annotations

import gc

import pytest

import kvactors
from kvactors.native import BlockTree, LifeTables
from tests.soak.memory import resident_kib

CONFIG = kvactors.Config.from_mapping(
    {
        "cache": {"block_size": 4},
        "device": {"num_blocks": 40, "policy": "retain"},
        "host": {"slots": 64},
        "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8, "dtype": "uint8"},
    }
)
MOST = 12 << 10
"""KiB that 12 caches may leave behind. With tables from the allocator it was about 50 MiB."""


async def served(number: int) -> None:
    """Open a cache, and evict blocks that both tiers remember."""
    async with kvactors.open(CONFIG) as cache:
        for request in range(60):
            prompt = [number * 61 + request] * 40 + [request] * 30
            async with await cache.acquire("r", prompt) as lease:
                await lease.wait_ready()
                await lease.commit(64)


async def test_closed_caches_leave_no_tables_resident() -> None:
    for number in range(4):
        await served(number)
    gc.collect()
    before = resident_kib()
    for number in range(12):
        await served(number)
    gc.collect()
    assert resident_kib() - before < MOST


@pytest.mark.parametrize(
    ("blocks", "touch", "least", "most"),
    [(1_000, True, -3, 3), (70_000, True, 27, 60), (70_000, False, -3, 3)],
)
def test_tables_are_brought_in_where_a_large_tier_is_made(blocks, touch, least, most) -> None:
    """In MiB, of a device and a host tier."""
    plain = resident_kib()
    lru = BlockTree(4, blocks, touch)
    before = resident_kib()
    tables = LifeTables()
    tree = BlockTree(4, blocks, touch, tables, retain_host=tables)
    grown = resident_kib() - before - (before - plain)
    assert least << 10 <= grown <= most << 10
    tree.check()
    lru.check()
