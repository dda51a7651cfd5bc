"""Calls that wait for the next pass of the loop, since this one has no inline turn left: order,
cancellation, restarts and the end of the cache."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.actor import loop
from kvactors.errors import LeaseBusy
from kvactors.prefix_index.messages import Acquire
from tests.support.cache import BLOCK, opened, prompt

timeout = asyncio.timeout  # noqa: TID251  (as callers may use it)

CALLS = {
    "commit": lambda lease: lease.commit(BLOCK),
    "finish": lambda lease: lease.finish(BLOCK),
    "preempt": lambda lease: lease.preempt(BLOCK),
}


@pytest.fixture(autouse=True)
def one_turn(monkeypatch):
    """A pass has one inline turn, on a machine of any speed."""
    monkeypatch.setattr(loop, "INLINE_TURNS", 1)
    monkeypatch.setattr(loop, "INLINE_TIME_S", 30.0)


async def passes(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


def index_of(cache):
    return cache.system.index_actor


@pytest.mark.parametrize("call", sorted(CALLS))
async def test_tokens_of_a_commit_that_waits_cannot_be_replaced(call):
    """The other task runs before it in the next pass. A truncate and an extend at that moment would
    let it commit tokens that are not computed."""
    async with opened(device=8, sinks=()) as cache:
        lease, other = [await cache.acquire(name, prompt(1, 1)) for name in ("a", "b")]
        await passes()

        async def replaces():
            await asyncio.sleep(0)
            with pytest.raises(LeaseBusy, match="a commit"):
                await lease.truncate(BLOCK - 1)

        spends = asyncio.create_task(other.commit(0))
        replacing = asyncio.create_task(replaces())
        commits = asyncio.create_task(CALLS[call](lease))
        await asyncio.gather(spends, replacing, commits)
        if call == "commit":
            assert commits.result() == 1
            assert lease.num_tokens == BLOCK
            await lease.finish()
        await other.finish()


def hot_calls(cache, lease):
    """The calls of a request that hits."""
    return {
        "acquire": lambda: cache.acquire("b", prompt(2, 1)),
        "commit": lambda: lease.commit(BLOCK),
        "finish": lambda: lease.finish(BLOCK),
    }


@pytest.mark.parametrize("seconds", [0.0, 30.0])
@pytest.mark.parametrize("kind", ["acquire", "commit", "finish"])
async def test_a_call_that_waits_for_a_pass_is_answered_there(monkeypatch, kind, seconds):
    """The oldest call has a turn of each pass, also of one without time."""
    monkeypatch.setattr(loop, "INLINE_TIME_S", seconds)
    async with opened(device=8, sinks=()) as cache:
        lease = await cache.acquire("a", prompt(1, 1))
        spends, other = [await cache.acquire(name, [1]) for name in ("spends", "other")]
        await passes()
        taken, turns = cache.system.index.channel.taken, index_of(cache).turns
        call = hot_calls(cache, lease)[kind]
        *_, found = await asyncio.gather(spends.commit(0), other.commit(0), call())
        assert index_of(cache).turns == turns + 3
        assert seconds == 0 or cache.system.index.channel.taken == taken
        for one in (lease, spends, other, *([found] if kind == "acquire" else [])):
            one.abandon()


async def test_a_request_that_waits_for_blocks_is_handled_in_the_order_of_the_calls(monkeypatch):
    """The task of the later one has two turns of a pass, for another call before it."""
    monkeypatch.setattr(loop, "INLINE_TURNS", 2)
    async with opened(device=4, sinks=()) as cache:
        runs = await cache.acquire("runs", prompt(1, 1))
        handlers, handled = index_of(cache).handlers, []
        acquire = handlers[Acquire]

        def recorded(message, envelope):
            handled.append(message.request_id)
            acquire(message, envelope)

        monkeypatch.setitem(handlers, Acquire, recorded)

        async def serve(name, commits):
            for _ in range(commits):
                await runs.commit(0)
            async with await cache.acquire(name, prompt(2, 1), wait_for_room=True):
                pass

        await passes()
        await asyncio.gather(serve("spends", 2), serve("second", 1), serve("first", 0))
        await runs.finish()
        assert handled.index("first") < handled.index("second")
