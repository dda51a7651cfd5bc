"""The notifier with sinks that misbehave, fail and recover, and its own restarts."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.errors import ActorFailed
from kvactors.flush_notifier.messages import BlocksAdded, BlocksRemoved, PathCached, TierCleared
from kvactors.types import Reason, Residency, Tier, join_hashes
from tests.flush_notifier.helpers import ROOT, Wired, announced, faulty, memory, names, path, until

FAULTS = ("down", "hang", "fail_every", "lose_answers")
NOTHING = {tier: set() for tier in Tier}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_misbehaving_sink_neither_delays_the_other_nor_loses_anything(fault):
    wired = Wired(
        memory("good"), faulty("bad"), batch=8, timeout_s=0.5 if fault == "hang" else 10.0
    )  # the good sink answers within it on a busy machine
    good, bad = wired.sinks
    bad.fault_mode = fault
    async with wired.running():
        for i in range(20):
            await wired.tell(announced(i, i + 1, i + 2))
        await until(lambda: len(good.view()[Tier.DEVICE]) == 60)
        await wired.tell(BlocksRemoved(path(0, 1, 2)[1], Tier.DEVICE, Reason.DEVICE_DROP))
        await until(lambda: bad.calls >= 3)
        bad.fault_mode = ""
        await wired.settle()
        assert bad.view() == good.view()
        assert len(good.view()[Tier.DEVICE]) == 57
        one, other = wired.actor.sinks.statistics()
        assert one.retried == 0 < other.retried
        assert one.pending == other.pending == 0


async def test_only_the_difference_is_sent_after_an_outage():
    sink = faulty("one")
    wired = Wired(sink, retry_max_s=2.0)
    async with wired.running():
        await wired.tell(announced(1, 2))
        await wired.settle()
        told = len(sink.inner.tasks)
        sink.fault_mode = "down"
        await wired.tell(announced(9))
        await until(lambda: sink.calls >= 8)  # the next one is more than a second away
        for i in range(10, 30):
            await wired.tell(
                announced(i), BlocksRemoved(path(i)[1], Tier.DEVICE, Reason.DEVICE_DROP)
            )
        sink.fault_mode = ""
        await wired.settle()
        assert [task.hashes for task in list(sink.inner.tasks)[told:]] == [path(9)[1]]
        (statistics,) = wired.actor.sinks.statistics()
        assert statistics.coalesced == 20


async def test_a_failed_sink_does_not_make_the_system_look_busy():
    sink = faulty("one")
    sink.fault_mode = "hang"
    wired = Wired(sink, timeout_s=5.0)
    async with wired.running():
        await wired.tell(announced(1))
        assert await wired.supervisor.drain(1.0)
        (statistics,) = wired.actor.sinks.statistics()
        assert statistics.in_flight
        await asyncio.sleep(0.02)
        assert wired.actor.sinks.statistics()[0].oldest_pending_age >= 0.02


async def test_statistics_count_tasks_and_blocks():
    sink = memory("one")
    wired = Wired(sink)
    async with wired.running():
        await wired.tell(announced(1, 2, 3))
        await wired.settle()
        await wired.tell(
            BlocksRemoved(join_hashes(names(1, 2, 3)[1:]), Tier.DEVICE, Reason.DEVICE_DROP)
        )
        await wired.settle()
        (statistics,) = wired.actor.sinks.statistics()
        assert (statistics.delivered, statistics.resident, statistics.gone, statistics.blocks) == (
            2,
            1,
            1,
            5,
        )
        assert (statistics.pending, statistics.in_flight, statistics.oldest_pending_age) == (
            0,
            False,
            0.0,
        )
        assert sink.counts == {Residency.RESIDENT: 1, Residency.GONE: 1}


async def test_a_new_incarnation_begins_a_new_epoch_and_then_takes_new_reports():
    wired = Wired(memory("good"), faulty("bad"))
    good, bad = wired.sinks
    async with wired.running():
        await wired.tell(announced(1, 2), announced(3))
        await wired.settle()
        bad.fault_mode = "hang"
        await wired.tell(announced(4))
        asker = asyncio.create_task(wired.settle())
        await until(lambda: len(good.view()[Tier.DEVICE]) == 4)
        await wired.tell(
            PathCached(ROOT, b"x", b"short", 0, 1, Tier.DEVICE, Reason.COMMIT, ROOT)
        )  # a fault: the notifier fails
        with pytest.raises(ActorFailed):
            await asker
        bad.fault_mode = ""
        await until(lambda: wired.actor.incarnation == 1)
        await wired.settle()
        assert good.epochs == bad.inner.epochs == [100, 101]
        assert good.view() == bad.view() == NOTHING
        await wired.tell(announced(1, 2))
        await wired.settle()
        assert good.view() == bad.view() == NOTHING | {Tier.DEVICE: set(names(1, 2))}
        assert good.tasks[-1].epoch == 101


async def test_without_sinks_it_keeps_no_books():
    wired = Wired()
    wired.sinks = ()
    async with wired.running():
        await wired.tell(
            announced(1),
            BlocksAdded(path(2)[1], Tier.HOST, Reason.LOAD),
            TierCleared(Tier.HOST, Reason.CLEAR),
        )
        await wired.settle()
        assert not len(wired.actor.ledger.tree)
        assert not wired.actor.ledger.orphans.tiers
