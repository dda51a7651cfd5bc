"""Reserved blocks, rejected tokens and media of later turns, through the public API: the table is
right, nothing leaks, and every position has the hash of the tokens that it holds in the end."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.errors import LeaseBusy
from tests.support.cache import BLOCK, opened, prompt


async def test_reserved_blocks_are_used_by_the_next_tokens_and_given_back():
    async with opened(device=8) as cache:
        async with await cache.acquire("a", prompt(1, 1)) as lease:
            added = await lease.reserve(2 * BLOCK + 1)
            assert len(added) == 3
            assert lease.block_table[1:] == added
            assert lease.num_tokens == BLOCK
            assert await lease.reserve(2 * BLOCK) == ()
            assert await lease.extend([1] * (BLOCK + 1)) == ()
            assert await lease.truncate(lease.num_tokens) == added[2:]
            assert lease.block_table[1:] == added[:2]
            await lease.reserve(2 * BLOCK)
        assert cache.statistics().prefix.blocks_free == 8


async def test_a_commit_in_parts_during_a_truncate_is_refused(monkeypatch, queued):
    monkeypatch.setattr("kvactors.prefix_index.work.TURN_BLOCKS", 1)
    async with opened(device=16) as cache, await cache.acquire("a", prompt(1, 6)) as lease:
        truncates = asyncio.ensure_future(lease.truncate(2 * BLOCK))
        await asyncio.sleep(0)
        with pytest.raises(LeaseBusy, match="a truncate"):
            await lease.commit(6 * BLOCK)
        await truncates
        assert await lease.commit(0) == 0


@pytest.mark.parametrize("split", [False, True])
async def test_a_media_item_is_not_cut(split):
    async with (
        opened(device=32, cache={"split_media": split}) as cache,
        await cache.acquire("a", prompt(1, 1), extra_keys=[(1, 2, "dog")]) as lease,
    ):
        with pytest.raises(ValueError, match="within the media item of 2 tokens at 1"):
            await lease.truncate(2)
        await lease.extend(prompt(2, 1), extra_keys=[(1, 2, "cat")])
        with pytest.raises(ValueError, match="within the media item of 2 tokens at 5"):
            await lease.truncate(6)
        await lease.truncate(7)
        await lease.truncate(5)
        await lease.extend([1, 2])
        await lease.truncate(6)
