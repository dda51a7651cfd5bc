"""Recorded forward passes: however a lease ends, no other request gets its blocks before the passes
that use them are over."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
import structlog

import kvactors
from kvactors.errors import DeadlineExceeded, DeviceError, LeaseEnded
from tests.cache.test_device_events import Event
from tests.support.cache import BLOCK, opened, prompt, settings

DEVICE = 8
"""Device blocks: all of them are the first request's."""


async def left_by_cancellation(lease):
    async with lease:
        await asyncio.sleep(3600)


async def left(lease):
    async with lease:
        pass


async def left_by_error(lease):
    async with lease:
        raise RuntimeError("of the client")


async def abandoned(lease):
    lease.abandon()


async def truncated(lease):
    assert len(await lease.truncate(0)) == DEVICE
    await lease.finish()


ENDS = {
    "cancellation": left_by_cancellation,
    "end of the block": left,
    "error": left_by_error,
    "abandon": abandoned,
    "finish": lambda lease: lease.finish(),
    "preempt": lambda lease: lease.preempt(BLOCK),
    "truncate": truncated,
}
WITHOUT_A_TASK = ("garbage collection", "abandon with an event", "cancelled call")


def new_event(form):
    """An event, and the call that completes it."""
    if form == "event":
        event = Event()
        return event, lambda: setattr(event, "state", True)
    future = asyncio.get_running_loop().create_future()

    async def waits():
        await future

    event = waits() if form == "coroutine" else future
    return event, lambda: future.set_result(None)


async def admitted(cache):
    """A request that needs every block of the device."""
    return await cache.acquire("other", prompt(2, DEVICE), wait_for_room=True)


async def turns():
    """Every task that can go on does so, also those that wait for a poll."""
    for _ in range(5):
        await asyncio.sleep(0.001)


async def begin_end(cache, how, event):
    """Begin to end a lease of every block, which takes part in a pass. Returns its task, if any."""
    lease = await cache.acquire("a", prompt(1, DEVICE))
    if how == "abandon with an event":
        lease.abandon(event=event)
    else:
        cache.record_pass([lease], event=event)
    if how == "cancelled call":
        lease._handle._lost(None)  # its answer came after the cancellation
    return None if how in WITHOUT_A_TASK else asyncio.ensure_future(ENDS[how](lease))


@pytest.mark.parametrize("form", ["event", "future", "coroutine"])
@pytest.mark.parametrize("how", [*ENDS, *WITHOUT_A_TASK])
async def test_blocks_of_a_pass_are_not_given_to_others_before_its_end(how, form):
    async with opened(device=DEVICE) as cache:
        event, complete = new_event(form)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            ending = await begin_end(cache, how, event)
            gc.collect()
        await asyncio.sleep(0)
        if how == "cancellation":
            ending.cancel()
        other = asyncio.ensure_future(admitted(cache))
        await turns()
        assert not other.done()
        assert cache.statistics().prefix.leases == 1
        if how in ("finish", "preempt", "truncate", "end of the block"):
            assert not ending.done()
        complete()
        await (await other).finish()
        if ending is not None:
            await asyncio.gather(ending, return_exceptions=True)


@pytest.mark.parametrize("form", ["event", "future"])
async def test_a_pass_that_fails_is_over(form):
    async with opened(device=DEVICE) as cache:
        lease = await cache.acquire("a", prompt(1, DEVICE))
        event, _ = new_event(form)
        cache.record_pass([lease], event=event)
        lease.abandon()
        other = asyncio.ensure_future(admitted(cache))
        await turns()
        assert not other.done()
        if form == "event":
            event.state = RuntimeError("device-side assert")
        else:
            event.set_exception(RuntimeError("device-side assert"))
        await (await other).finish()


async def test_an_overdue_pass_keeps_its_blocks_and_is_logged():
    with structlog.testing.capture_logs() as logs:
        async with opened(device=DEVICE, cache={"default_deadline_s": 0.01}) as cache:
            lease = await cache.acquire("a", prompt(1, DEVICE))
            event, complete = new_event("event")
            cache.record_pass([lease], event=event)
            with pytest.raises(DeadlineExceeded):
                await lease.finish()
            assert not lease._handle.ended, "a late event leaves the lease open"
            lease.abandon()
            with pytest.raises(DeadlineExceeded):
                await admitted(cache)
            while not any("overdue" in one["event"] for one in logs):
                await asyncio.sleep(0.001)
            complete()
            await cache.wait_idle(deadline=5.0)


async def test_a_cache_closes_during_a_pass_that_does_not_end():
    event = Event()
    async with kvactors.open(settings(actors={"drain_timeout_s": 0.1})) as cache:
        lease = await cache.acquire("a", prompt(1, 1))
        cache.record_pass([lease], event=event)
        lease.abandon()
    await asyncio.sleep(0)
    before = event.queries
    await turns()
    assert event.queries == before, "nothing of the cache goes on"
    assert not cache._context._giving_back


async def test_bad_passes_are_refused_and_nothing_is_recorded():
    async with opened(device=DEVICE) as cache, opened(device=DEVICE) as second:
        lease, ended = await cache.acquire("a", prompt(1, 1)), await cache.acquire("b", [1])
        foreign = await second.acquire("c", [1])
        await ended.finish()
        event = Event()
        for leases, given, error, text in (
            ([lease, ended], {"event": event}, LeaseEnded, "'b' has ended"),
            ([lease, foreign], {"event": event}, ValueError, "'c' is of another cache"),
            ([lease, 5], {"event": event}, TypeError, "leases must be .* Lease, not of int"),
            ([lease], {}, ValueError, "neither event nor stream"),
            ([lease], {"event": event, "stream": 7}, ValueError, "give one of them"),
            ([lease], {"event": 5}, TypeError, "event must have"),
            ([lease], {"stream": 7}, DeviceError, "streams are out of reach"),
        ):
            with pytest.raises(error, match=text):
                cache.record_pass(leases, **given)
        with pytest.raises(TypeError, match="event must have"):
            lease.abandon(event=5)
        await lease.extend([1])
        await lease.finish()  # no pass holds it up
        await foreign.finish()
