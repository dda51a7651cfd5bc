"""Chunked prefill: the whole prompt is matched, and blocks are taken chunk by chunk."""

from __future__ import annotations

import pytest

from kvactors.prefix_index import work
from tests.support.cache import BLOCK, opened, prompt, serve

HOST = {"slots": 8, "transit_slots": 16}
STORE = {"backend": "memory", "write_policy": "write_through"}
TIERS = [{}, {"host": HOST}, {"host": HOST, "storage": STORE}]


async def prefill(cache, lease, chunk):
    """Compute what is not cached, chunk by chunk. Returns the sizes of the block table."""
    await lease.wait_ready()
    known, sizes = lease.cached_tokens // BLOCK, []
    table = lease.block_table
    assert cache.device.check(table[:known], lease.hashes(0, known)) == []
    while True:
        sizes.append(len(lease.block_table))
        covered = lease.covered_tokens // BLOCK
        cache.device.fill(lease.block_table[known:covered], lease.hashes(known, covered))
        known = covered
        if lease.covered_tokens == lease.num_tokens:
            return sizes
        await lease.commit(covered * BLOCK)
        added = await lease.next_chunk(chunk)
        assert added
        assert lease.block_table[-len(added) :] == added


@pytest.mark.parametrize("tiers", TIERS, ids=["device", "host", "storage"])
@pytest.mark.parametrize("long", [False, True])
async def test_a_prompt_is_computed_in_chunks(tiers, long, monkeypatch):
    if long:
        monkeypatch.setattr(work, "TURN_BLOCKS", 2)
    tokens = prompt(1, 7, tail=1)
    async with opened(device=16, **tiers) as cache:
        lease = await cache.acquire("chunked", tokens, chunk_tokens=2 * BLOCK)
        assert (len(lease.block_table), lease.covered_tokens) == (2, 2 * BLOCK)
        assert lease.num_tokens == len(tokens)
        assert await prefill(cache, lease, 2 * BLOCK) == [2, 4, 6, 8]
        await lease.finish(lease.num_tokens)
        whole = await serve(cache, "whole", tokens)
        assert whole.cached_tokens == 7 * BLOCK


async def test_tokens_without_blocks_cannot_be_committed():
    async with opened(device=8) as cache:
        lease = await cache.acquire("chunked", prompt(1, 4), chunk_tokens=BLOCK)
        for call in (lease.commit, lease.finish, lease.preempt):
            with pytest.raises(ValueError, match="blocks for 4 of its 16 tokens"):
                await call(2 * BLOCK)
        await lease.commit(BLOCK)
        await lease.finish()
