"""The reference engine: what it verifies, and what it counts."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from kvactors.errors import NoRoom
from kvactors.scenario.engine import Engine, Model
from kvactors.scenario.report import Totals
from tests.support.cache import opened, prompt


class RottenModel(Model):
    """Fills some blocks with other contents. rotten: how many are still to come."""

    def __init__(self, device, rotten):
        super().__init__(device)
        self.rotten = rotten

    async def fill(self, blocks, names):
        spoilt, self.rotten = min(self.rotten, len(blocks)), 0
        await super().fill(blocks, bytes(32 * spoilt) + names[32 * spoilt :])


@asynccontextmanager
async def engine(*, rotten: int = 0, **options):
    """An engine on a device of 8 blocks and a host tier of 8."""
    async with opened(host={"slots": 8, "transit_slots": 8}) as cache:
        found = []

        async def wrong(request, positions, when):
            found.append((request.lease.request_id, list(positions), when))

        model = RottenModel(cache.device, rotten)
        yield Engine(cache, Totals(), model, on_wrong=wrong, **options), found


async def test_loaded_blocks_are_verified():
    async with engine(rotten=2) as (one, found):
        await one.serve("a", prompt(1, 4))
        await one.serve("b", prompt(2, 8))
        await one.serve("a again", prompt(1, 4))
        assert found == [("a again", [0, 1], "served")]
        assert one.totals.host == one.totals.verified_blocks > 2
        assert one.totals.corrupt_blocks_served == 2
        assert (one.totals.requests, one.totals.finished) == (3, 3)


async def test_device_hits_are_not_verified_unless_it_is_thorough():
    for thorough in (False, True):
        async with engine(rotten=1, thorough=thorough) as (one, found):
            lease = await one.cache.acquire("a", prompt(1, 2, tail=1))
            await lease.wait_ready()
            await one.model.fill(lease.block_table[:2], lease.hashes(0, 2))
            await lease.finish(9)
            await one.serve("b", prompt(1, 2, tail=1))
            assert found == ([("b", [0], "served")] if thorough else [])


async def test_a_thorough_engine_verifies_what_a_request_holds():
    async with engine(rotten=1, thorough=True) as (one, found):
        await one.serve("a", prompt(1, 2), prompt(2, 1))
        assert found == [("a", [0], "held")]
        assert one.totals.verified_blocks == 3


async def test_too_large_a_request_is_rejected_and_one_without_free_blocks_waits():
    async with engine() as (one, _):
        await one.serve_patiently("large", prompt(1, 8), [1])
        assert (one.totals.rejected, one.totals.no_room) == (1, 0)
        async with await one.cache.acquire("held", prompt(2, 7)) as lease:
            await lease.wait_ready()
            with pytest.raises(NoRoom):
                await one.serve("at once", prompt(3, 2))
            waiting = asyncio.create_task(one.serve_patiently("late", prompt(3, 2)))
            while one.totals.no_room < 2:
                await asyncio.sleep(0.001)
        await waiting
        await one.serve_patiently("now", prompt(3, 2))
        assert (one.totals.rejected, one.totals.finished) == (1, 2)
        assert one.totals.errors == []
