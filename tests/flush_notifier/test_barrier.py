"""`wait_flushed`: every sink matches the tiers, at rest and under load, and no call waits longer
than its deadline."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

import kvactors
from kvactors.errors import DeadlineExceeded
from kvactors.flush_notifier.messages import BlocksRemoved, WaitFlushed
from kvactors.flush_notifier.sinks import MemorySink
from kvactors.settings import Config
from kvactors.settings.sinks import MemorySinkConfig
from kvactors.testing.faults import FaultySink
from kvactors.types import Reason, Tier
from tests.flush_notifier.helpers import Wired, announced, faulty, names
from tests.support.deadline import deadline_after

CONFIG = Config.from_mapping(
    {
        "cache": {"block_size": 4},
        "device": {"num_blocks": 16},
        "host": {"slots": 16},
        "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 2},
        "flush": {"retry_min_s": 0.01, "retry_max_s": 0.05},
        "actors": {"drain_timeout_s": 2.0},
    }
)


def sink(name: str) -> FaultySink:
    return FaultySink(MemorySink(MemorySinkConfig(name=name), 4))


async def request(cache, seed: int, blocks: int = 3) -> None:
    async with await cache.acquire(f"r{seed}", [seed] * (4 * blocks)) as lease:
        await lease.wait_ready()
        await lease.commit(4 * blocks)


async def test_under_load_the_barrier_covers_the_state_at_the_call():
    """Requests never stop, so the cache is never idle. Blocks committed before the call have been
    sent when it returns."""
    one = sink("one")
    async with kvactors.open(CONFIG, sinks=[one]) as cache:

        async def churn() -> None:
            for seed in range(10**9):
                await request(cache, seed % 50)

        load = [asyncio.create_task(churn()) for _ in range(3)]
        try:
            for seed in range(100, 110):
                async with await cache.acquire("probe", [seed] * 8) as lease:
                    await lease.wait_ready()
                    await lease.commit(8)
                    await cache.wait_flushed(5.0, at_rest=False)
                    held = one.view()[Tier.DEVICE]
                    assert {lease.hashes(0, 2)[:32], lease.hashes(0, 2)[32:]} <= held, (
                        "pinned, so still true"
                    )
        finally:
            for task in load:
                task.cancel()
            await asyncio.gather(*load, return_exceptions=True)


async def test_a_failed_sink_is_waited_for_no_longer_than_asked_and_may_be_left_out():
    one, dead = sink("one"), sink("dead")
    async with kvactors.open(CONFIG, sinks=[one, dead]) as cache:
        dead.fault_mode = "down"
        await request(cache, 1)
        with pytest.raises(DeadlineExceeded):
            await cache.wait_flushed(0.2)
        await cache.wait_flushed(5.0, sinks=["one"])
        assert cache.count_divergent_blocks(["one"]) == 0
        assert cache.count_divergent_blocks() > 0
        with pytest.raises(ValueError, match=r"there is no sink 'two' \(sinks: one, dead\)"):
            await cache.wait_flushed(1.0, sinks=["two"])
        dead.fault_mode = ""
        await cache.wait_flushed(5.0)
        assert cache.count_divergent_blocks() == 0


async def test_closing_delivers_to_sinks_that_respond_and_does_not_wait_for_others():
    slow, dead = sink("slow"), sink("dead")
    began = asyncio.get_running_loop().time()
    patient = replace(CONFIG, actors=replace(CONFIG.actors, drain_timeout_s=60.0))
    async with kvactors.open(patient, sinks=[slow, dead]) as cache:
        dead.fault_mode = "down"
        await request(cache, 1)
        await cache.wait_flushed(5.0, sinks=["slow"])
        lease = await cache.acquire("last", [9] * 8)
        await lease.commit(8)
        await lease.finish()
        slow.fault_mode, slow.delay = "slow", 0.05
    assert len(slow.view()[Tier.DEVICE]) == 5
    assert asyncio.get_running_loop().time() - began < 20, "nobody waited for the dead one"


async def test_the_barrier_covers_corrections_of_an_unfinished_call():
    """A block is evicted while its arrival is being sent: a barrier asked then ends after the
    correction."""
    slow = faulty("slow")
    wired = Wired(slow, timeout_s=5.0)
    async with wired.running():
        await wired.settle()
        slow.fault_mode, slow.delay = "slow", 0.1
        await wired.tell(announced(1, 2))
        await asyncio.sleep(0.02)
        await wired.tell(BlocksRemoved(names(1, 2)[1], Tier.DEVICE, Reason.DEVICE_DROP))
        assert await wired.ref.ask(WaitFlushed(), deadline=deadline_after(30.0))
        assert slow.view()[Tier.DEVICE] == {names(1, 2)[0]}
