"""Commits whose device work is asynchronous: blocks are shareable when their event has completed,
and never if it fails."""

from __future__ import annotations

import asyncio

import pytest

from kvactors.device.events import POLL_S, DeviceEvents
from kvactors.errors import DeadlineExceeded, DeviceError, LeakedError, LeaseBusy
from tests.support.cache import BLOCK, opened, prompt


class Event:
    """A GPU's event. state: an exception is raised by `query`."""

    def __init__(self, state: bool | BaseException = False) -> None:
        self.state = state
        self.queries = 0

    def query(self) -> bool:
        self.queries += 1
        if isinstance(self.state, BaseException):
            raise self.state
        return self.state

    def synchronize(self) -> None:
        raise AssertionError("blocks the loop")


async def shared(cache, tokens) -> int:
    """Blocks that another request of these tokens hits."""
    lease = await cache.acquire("other", [*tokens, 1])
    await lease.finish()
    return lease.hits.device


async def passes(seconds: float = 20 * POLL_S) -> None:
    await asyncio.sleep(seconds)


def events_of(cache) -> DeviceEvents:
    return cache._context.events


@pytest.mark.parametrize("form", ["event", "future", "coroutine"])
async def test_blocks_are_shared_only_after_their_event(form):
    async with opened(device=16) as cache:
        lease, tokens = await cache.acquire("a", prompt(1, 2)), prompt(1, 2)
        event, future = Event(), asyncio.get_running_loop().create_future()

        async def complete() -> None:
            await future

        given = {"event": event, "future": future, "coroutine": complete()}
        commit = asyncio.ensure_future(lease.commit(2 * BLOCK, event=given[form]))
        await passes()
        assert not commit.done()
        assert await shared(cache, tokens) == 0
        event.state = True
        future.set_result(None)
        for other, one in given.items():
            if other == "coroutine" != form:
                one.close()
        assert await commit == 2
        assert await shared(cache, tokens) == 2
        assert not len(events_of(cache))
        await lease.finish()


@pytest.mark.parametrize(
    ("error", "cause"),
    [(RuntimeError("device-side assert"), RuntimeError), (asyncio.CancelledError(), LeakedError)],
)
@pytest.mark.parametrize("late", [False, True])
async def test_a_failed_event_shares_nothing_and_the_lease_goes_on(error, cause, late):
    async with opened(device=16) as cache, await cache.acquire("a", prompt(1, 2)) as lease:
        event = Event(state=False if late else error)
        commit = asyncio.ensure_future(lease.commit(2 * BLOCK, event=event))
        if late:
            await passes()
            event.state = error
        with pytest.raises(DeviceError, match="has failed") as raised:
            await commit
        assert isinstance(raised.value.__cause__, cause)
        assert await shared(cache, prompt(1, 2)) == 0
        assert not len(events_of(cache))
        assert await lease.commit(BLOCK) == 1
        await lease.extend([1])


@pytest.mark.parametrize("form", ["event", "future", "coroutine"])
async def test_an_event_has_a_deadline(form):
    async with opened(device=16) as cache, await cache.acquire("a", prompt(1, 2)) as lease:
        future = asyncio.get_running_loop().create_future()
        cancelled = []

        async def hang() -> None:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(True)
                raise

        given = {"event": Event, "future": lambda: future, "coroutine": hang}[form]()
        with pytest.raises(DeadlineExceeded, match="not completed in time"):
            await lease.commit(BLOCK, event=given, deadline=0.02)
        await asyncio.sleep(0)
        assert cancelled == [True] * (form == "coroutine")
        assert not future.cancelled(), "a future of the caller's is not ours to cancel"
        assert not len(events_of(cache))
        with pytest.raises(DeadlineExceeded):
            await lease.finish(BLOCK, event=Event(), deadline=0.02)
        assert await shared(cache, prompt(1, 2)) == 0
        await lease.extend([1])


async def test_tokens_of_a_commit_that_waits_are_not_dropped():
    """Other tokens in their place would be found under the bytes of the first."""
    async with opened(device=16) as cache, await cache.acquire("a", prompt(1, 3)) as lease:
        event = Event()
        commit = asyncio.ensure_future(lease.commit(2 * BLOCK, event=event))
        await passes()
        with pytest.raises(LeaseBusy, match="a commit"):
            await lease.truncate(2 * BLOCK - 1)
        await lease.truncate(2 * BLOCK)
        await lease.extend(prompt(4, 1))
        event.state = True
        assert await commit == 2
