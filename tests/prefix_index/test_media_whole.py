"""A media item is cached whole or not at all. The blocks of a part of one are computed again, into
private blocks."""

from __future__ import annotations

from kvactors.native import Path
from kvactors.prefix_index.leases import LeaseState
from kvactors.prefix_index.tree import BlockIndex
from tests.prefix_index.objects import effects_of, lease_table

BLOCK, ROOT = 4, bytes(32)


def test_every_position_of_a_request_has_a_block_after_a_load_ended_within_an_item():
    """Position 0 is on the device, positions 1 and 2 are loaded, and only 1 arrives."""
    index = BlockIndex(BLOCK, 16, 64, recompute_last_token=False)
    tree, tokens = index.tree, list(range(3 * BLOCK))
    first, second = Path(BLOCK, ROOT), Path(BLOCK, ROOT)
    for path in (first, second):
        path.extend(tokens)
    tree.pin(first)
    first.assign(0, index.take(3))
    tree.commit(first, 1)
    assert tree.pin(second)[0] == 1
    second.assign(1, index.take(2))
    load = tree.begin_load(second, 1, 3)
    assert len(tree.finish_load(load, 1)) == 1
    assert tree.settle(second) == 2
    assert second.num_held == 3

    lease = LeaseState(2, "second", second, tree, 0.0)
    lease.media, lease.device_hits, lease.storage_hits = ((0, 3 * BLOCK),), 1, 1
    assert effects_of(lease_table(index).grant, lease) == []
    table = second.blocks()
    assert second.num_committed == 0
    assert min(table) >= 0
    assert not set(table) & set(first.blocks(0, 2))
    assert len(set(table)) == 3
    assert (lease.device_hits, lease.storage_hits) == (0, 0)
    tree.commit(second, 3)
    for path in (first, second):
        index.pool.give(tree.release(path))
    assert index.evictable() + index.free == 16
