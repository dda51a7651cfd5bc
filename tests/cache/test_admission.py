"""When requests are admitted and under which name, their counters and announcements."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors.actor.loop import MailboxLoop
from kvactors.errors import NotReady
from kvactors.identity import PLAIN
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.waiting import TURN_REQUESTS, WaitQueue
from tests.support.cache import BLOCK, opened, prompt, serve

HOST = {"slots": 8, "transit_slots": 16}
STORE = {"backend": "memory", "write_policy": "write_through"}


# -- namespaces


@pytest.mark.parametrize("storage", [{}, STORE], ids=["device", "storage"])
@pytest.mark.parametrize("paused", [False, True])
async def test_a_waiting_request_is_admitted_under_the_namespace_of_its_admission(paused, storage):
    """It waits for evictions, or for `resume`. Its loads are sent ahead under the old name: they
    must not end in blocks of the new one."""
    tokens = prompt(1, 3, tail=1)
    async with opened(device=8, host=HOST, storage=storage) as cache:
        await serve(cache, "old weights", tokens)
        await cache.wait_idle()
        await serve(cache, "other", prompt(2, 8))
        await cache.wait_idle()
        if paused:
            await cache.pause()
        waits = asyncio.ensure_future(cache.acquire("waits", tokens))
        named = asyncio.ensure_future(cache.set_namespace("new weights"))
        if paused:
            await named
            await cache.resume()
        lease = await waits
        await named
        assert lease._path.root == cache.system.roots.root(PLAIN), "it has waited"
        await lease.wait_ready()
        assert lease.cached_tokens == 0
        cache.device.fill(lease.block_table[:3], lease.hashes(0, 3))
        await lease.finish(3 * BLOCK)
        assert (await serve(cache, "new weights", tokens)).cached_tokens == 3 * BLOCK
        await cache.set_namespace("default")
        again = await serve(cache, "old weights again", tokens)
        assert again.hashes(0, 3) != lease.hashes(0, 3)


# -- waiting


async def test_thousands_of_waiting_requests_are_served_a_few_a_turn(monkeypatch):
    """Each costs the same however many wait, and no turn takes more than its share of them."""
    steps = {"turn": 0, "most": 0, "all": 0}
    serve, admit = WaitQueue._serve_first, PrefixIndex._admit

    def counted(method):
        def call(self, *args):
            steps["turn"] += 1
            steps["all"] += 1
            return method(self, *args)

        return call

    def turned(method):
        def call(self, *args):
            steps["turn"] = 0
            method(self, *args)
            steps["most"] = max(steps["most"], steps["turn"])

        return call

    monkeypatch.setattr(MailboxLoop, "handle", turned(MailboxLoop.handle))
    monkeypatch.setattr(PrefixIndex, "admit_waiting", turned(PrefixIndex.admit_waiting))
    monkeypatch.setattr(WaitQueue, "_serve_first", counted(serve))
    monkeypatch.setattr(PrefixIndex, "_admit", counted(admit))
    count = 2000
    async with opened(device=8, sinks=()) as cache:
        await cache.pause()
        waiting = [
            asyncio.ensure_future(cache.acquire(f"r{n}", [n], deadline=600.0)) for n in range(count)
        ]
        await cache.wait_idle()
        assert len(cache.system.index_actor.queue.held) == count
        given_up = waiting[::2]
        for one in given_up:
            one.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        await cache.wait_idle()
        assert len(cache.system.index_actor.queue.held) == count // 2
        done = asyncio.ensure_future(end_each(waiting[1::2]))
        await cache.resume()
        await done
    assert steps["most"] <= 2 * TURN_REQUESTS + 2
    assert steps["all"] <= 3 * count


async def end_each(waiting):
    for one in waiting:
        try:
            await (await one).finish()
        except kvactors.NoRoom:
            continue


# -- counters and announcements


async def test_a_request_preempted_and_resumed_is_counted_once():
    async with opened(device=16) as cache:
        tokens = prompt(1, 4, tail=1)
        lease = await cache.acquire("a", tokens)
        await lease.preempt(4 * BLOCK)
        resumed = await cache.acquire("a", tokens)
        assert resumed.hits.device == 4
        await resumed.finish()
        index = cache.statistics().prefix
        assert (index.requests, index.blocks_looked_up, index.device_hits, index.resumed) == (
            1,
            4,
            0,
            1,
        )
        await serve(cache, "a", tokens, verify=False)
        index = cache.statistics().prefix
        assert (index.requests, index.blocks_looked_up, index.device_hits, index.resumed) == (
            2,
            8,
            4,
            1,
        )


async def test_finish_commits_the_computed_blocks_or_changes_nothing():
    async with opened(device=16, host=HOST) as cache:
        tokens = prompt(1, 3, tail=2)
        lease = await cache.acquire("a", tokens)
        for wrong in (3 * BLOCK + 3, 10**6):
            with pytest.raises(ValueError, match="computed_tokens"):
                await lease.finish(wrong)
        cache.device.fill(list(lease.block_table[:3]), lease.hashes(0, 3))
        await lease.finish(computed_tokens=3 * BLOCK + 1)
        assert (await serve(cache, "again", tokens)).cached_tokens == 3 * BLOCK
        for number in range(4):
            await serve(cache, "other", prompt(10 + number, 8))
        await cache.wait_idle()
        loading = await cache.acquire("loading", tokens)
        if loading.pending:
            with pytest.raises(NotReady):
                await loading.finish(3 * BLOCK)
            await loading.wait_ready()
        await loading.finish()
