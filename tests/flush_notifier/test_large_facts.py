"""Facts about very many blocks are taken in steps: others run in between, no later fact overtakes,
and sinks hear of the whole."""

from __future__ import annotations

import asyncio

from kvactors.flush_notifier.deliver import STEP_BLOCKS
from kvactors.flush_notifier.messages import BlocksRemoved, TierCleared
from kvactors.types import Reason, Residency, Tier
from tests.flush_notifier.helpers import Wired, announced, finished, memory, names, path

MANY = 4 * STEP_BLOCKS + 7


async def test_others_run_between_the_steps():
    wired = Wired(memory("one", report_gains_at="request_finish"))
    async with wired.running():
        steps = 0

        async def count() -> None:
            nonlocal steps
            while True:
                steps += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        await wired.tell(announced(*range(MANY)))
        while not len(wired.actor.ledger.tree):
            await asyncio.sleep(0)
        before = steps
        while len(wired.actor.ledger.tree) < MANY:
            await asyncio.sleep(0)
        assert steps - before >= 2
        counting.cancel()


async def test_a_clear_goes_over_everything_although_blocks_come_back_right_after():
    sink = memory("one")
    wired = Wired(sink)
    async with wired.running():
        await wired.tell(finished(*range(MANY)))
        await wired.settle()
        await wired.tell(TierCleared(Tier.DEVICE, Reason.CLEAR), announced(0, 1, 2))
        await wired.settle()
        assert sink.view()[Tier.DEVICE] == set(names(0, 1, 2))


async def test_a_large_fact_is_one_task():
    sink = memory("one")
    wired = Wired(sink, batch=16)
    async with wired.running():
        await wired.tell(finished(*range(MANY)))
        await wired.settle()
        await wired.tell(BlocksRemoved(path(*range(MANY))[1], Tier.DEVICE, Reason.CPU_EVICTION))
        await wired.settle()
        assert [(task.residency, task.start_block_idx, task.count) for task in sink.tasks] == [
            (Residency.RESIDENT, 0, MANY),
            (Residency.GONE, 0, MANY),
        ]
