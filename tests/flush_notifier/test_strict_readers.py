"""Readers that reject violations of the tree rule: of flush tasks, and of KV events over real
sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

import kvactors
from kvactors.flush_notifier.sinks.kv_wire import BlockRemoved, BlockStored
from kvactors.types import HASH_BYTES, Reason, Tier
from tests.flush_notifier.helpers import EVERYTHING, announced, do, ledger, names, settle
from tests.flush_notifier.test_kv_events import BLOCK, churn, config, tiers_of
from tests.support.mirror import Mirror, Reader
from tests.support.tree_reader import TreeReader

pytestmark = pytest.mark.full


@pytest.mark.parametrize("max_blocks", [1, 2, 4096])
async def test_a_strict_reader_rejects_nothing(tmp_path, max_blocks):
    """Every batch that was published, with tiers so small that paths are interrupted all the
    time."""
    async with kvactors.open(config(tmp_path, max_blocks=max_blocks)) as cache:
        sink: Any = cache.sinks["kv_events"]
        reader = Reader(sink.endpoint, sink.replay_endpoint)
        reader.mirror.expected = sink.events.window.since(0)[0][0]
        assert await asyncio.to_thread(reader.catch_up), (
            "from the first batch on, which clears everything"
        )
        for start in range(0, 60, 10):
            await churn(cache, range(start, start + 10))
            if start == 30:
                await cache.clear()
            await asyncio.to_thread(reader.catch_up)
        await cache.wait_flushed(10.0)
        assert await asyncio.to_thread(reader.reach, sink.events.sequence, 20.0)
        assert {m: h for m, h in reader.mirror.view.items() if h} == tiers_of(cache)
        assert reader.mirror.orphans == 0
        reader.close()


def test_the_strict_reader_rejects_orphans():
    def stored(*blocks, parent=None, medium="GPU"):
        return BlockStored(
            list(blocks), parent, [0] * BLOCK * len(blocks), BLOCK, None, medium, None
        )

    def removed(*blocks, medium="GPU"):
        return BlockRemoved(list(blocks), medium)

    mirror = Mirror()
    mirror.apply(
        [stored(1, 2, 3), stored(4, parent=9), stored(2, parent=1, medium="CPU"), removed(2)]
    )
    assert (mirror.view, mirror.orphans) == ({"GPU": {1}, "CPU": {2}}, 2), (
        "4 has no parent, 3 is cut off"
    )
    mirror.apply([stored(3, parent=2), stored(3, parent=2, medium="STORAGE"), removed(1)])
    assert not any(mirror.view.values())
    assert mirror.orphans == 5, "3 on GPU has none there, and 2 and 3 go with 1"
    mirror.apply([stored(1, 2), removed(2, 1)])
    assert mirror.orphans == 5


def test_the_strict_reader_of_tasks_names_the_broken_rule():
    book, reader = ledger(EVERYTHING), TreeReader()
    do(book.announce(announced(1, 2, 3)))
    (gains,) = settle(book)
    do(book.lose(names(1, 2, 3)[2], Tier.DEVICE, Reason.CPU_EVICTION))
    (loss,) = settle(book)
    do(book.lose(names(1)[0], Tier.DEVICE, Reason.CPU_EVICTION))
    (rest,) = settle(book)
    reader.take([gains, loss, rest])
    assert not reader.violations
    assert not reader.held
    reader.take([gains, rest, loss])
    assert [what.split(" (")[0][9:] for what in reader.violations] == [
        "is removed, and a block below it is not"
    ]
    reader.clear()
    below = replace(
        gains,
        start_block_idx=1,
        count=2,
        hashes=gains.hashes[HASH_BYTES:],
        parent=gains.hashes[:HASH_BYTES],
    )
    reader.take([replace(gains, tier=Tier.HOST), below])
    assert reader.violations[1][9:].startswith(
        "is announced on DEVICE, and the block above it is not there"
    )
    reader.clear()
    reader.take([below])
    assert reader.violations[2][9:].startswith("is announced, and the block above it is nowhere")
    assert len(reader.violations) == 3
