"""A commit of very many blocks takes several short turns, and is otherwise what it would be in
one."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors import call_context
from kvactors.errors import CacheClosed, LeaseEnded
from kvactors.lease import LeaseHandle
from kvactors.prefix_index.messages import Commit
from tests.support.cache import BLOCK, opened, prompt, settings


@pytest.fixture(autouse=True)
def two_blocks_a_message(monkeypatch):
    monkeypatch.setattr(call_context, "turn_blocks_of", lambda block_size: 2)


def commits(monkeypatch):
    """The tokens that each Commit names, as they are sent."""
    sent, ask = [], LeaseHandle.ask

    def note(lease, message, at, **rest):
        if isinstance(message, Commit):
            sent.append(message.computed_tokens)
        return ask(lease, message, at, **rest)

    monkeypatch.setattr(LeaseHandle, "ask", note)
    return sent


async def test_no_message_commits_more_blocks_than_a_turn_may_take(monkeypatch):
    async with opened() as cache:
        sent = commits(monkeypatch)
        lease = await cache.acquire("a", prompt(1, 7, tail=1))
        assert await lease.commit(7 * BLOCK + 1) == 7
        assert sent == [2 * BLOCK, 4 * BLOCK, 6 * BLOCK, 7 * BLOCK + 1]
        sent.clear()
        assert await lease.commit(7 * BLOCK + 1) == 7
        assert sent == [7 * BLOCK + 1], "what is committed is not committed again"
        await lease.finish()
        again = await cache.acquire("b", prompt(1, 7, tail=1))
        assert again.hits == (7, 0, 0)
        await again.finish()


async def test_a_commit_that_is_refused_changes_nothing(monkeypatch):
    async with opened() as cache:
        chunked = await cache.acquire("b", prompt(2, 7), chunk_tokens=3 * BLOCK)
        with pytest.raises(ValueError, match="call next_chunk"):
            await chunked.commit(7 * BLOCK)
        assert cache.statistics().prefix.nodes == 0
        await chunked.finish()
        lease = await cache.acquire("a", prompt(1, 7))
        for wrong in (7 * BLOCK + 1, -1):
            with pytest.raises(ValueError):
                await lease.commit(wrong)
        assert cache.statistics().prefix.nodes == 0
        assert await lease.commit(7 * BLOCK) == 7
        await lease.finish()


async def test_a_commit_cancelled_between_its_parts_ends_the_lease_and_keeps_the_parts(monkeypatch):
    async with opened() as cache:
        lease = await cache.acquire("a", prompt(1, 7))
        ask = LeaseHandle.ask
        second = asyncio.Event()

        async def hold_the_second(lease, message, at, **rest):
            if isinstance(message, Commit) and message.computed_tokens > 2 * BLOCK:
                second.set()
                await asyncio.Event().wait()
            return await ask(lease, message, at, **rest)

        monkeypatch.setattr(LeaseHandle, "ask", hold_the_second)
        task = asyncio.create_task(lease.commit(7 * BLOCK))
        await second.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(LeaseEnded):
            await lease.finish()
        monkeypatch.undo()
        await cache.wait_idle()
        again = await cache.acquire("b", prompt(1, 7))
        assert again.hits == (2, 0, 0)
        await again.finish()
        assert cache.statistics().prefix.leases == 0


async def test_a_commit_in_parts_ends_when_the_cache_is_closed(monkeypatch):
    async with kvactors.open(settings()) as cache:
        sent, ask = commits(monkeypatch), LeaseHandle.ask
        lease = await cache.acquire("a", prompt(1, 7))

        async def close_after_the_first(lease, message, at, **rest):
            answer = await ask(lease, message, at, **rest)
            if isinstance(message, Commit):
                cache.close()
            return answer

        monkeypatch.setattr(LeaseHandle, "ask", close_after_the_first)
        with pytest.raises(CacheClosed):
            await lease.commit(7 * BLOCK)
        assert sent == [2 * BLOCK]
