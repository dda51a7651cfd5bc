"""One decode step of many leases: every lease is as if it were extended and committed alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvactors import decode_batch as steps_module
from kvactors.decode_batch import Step, Stepped
from kvactors.errors import LeaseBusy, LeaseEnded, NoRoom, NotReady
from kvactors.prefix_index.messages import StepLeases
from tests.support.cache import BLOCK, opened, prompt, serve

HOST = {"slots": 8, "transit_slots": 16}


def agree(cache, lease):
    """The lease and the index have the same tokens and blocks, or the lease has ended for both."""
    record = cache.system.index_actor.leases.get(lease._handle.id)
    if lease._handle.ended:
        assert record is None
        return False
    assert record.path.num_tokens == lease.num_tokens
    assert tuple(record.path.blocks()) == lease.block_table
    return True


async def acquired(cache, count, blocks=1):
    return [await cache.acquire(f"{n}", prompt(100 + n, blocks)) for n in range(count)]


@pytest.mark.parametrize("device", [64, 40], ids=["free", "evicted"])
async def test_one_message_steps_many_leases(device, monkeypatch):
    sent = []
    async with opened(device=device) as cache:
        leases = await acquired(cache, 20)
        await serve(cache, "other", prompt(2, 20))
        ask = type(cache.system.index).ask

        async def counted(self, message, **options):
            sent.append(type(message))
            return await ask(self, message, **options)

        monkeypatch.setattr(type(cache.system.index), "ask", counted)
        await cache.step([Step(one, [1], one.num_tokens) for one in leases])
        assert sent == [StepLeases]
        monkeypatch.undo()
        for lease in leases:
            await lease.finish()


async def ended(cache):
    lease = await cache.acquire("ended", [1])
    await lease.finish()
    return Step(lease, [1]), LeaseEnded


async def too_large(cache):
    return Step(await cache.acquire("full", [1]), [1] * (BLOCK * 30), 0), NoRoom


async def loading(cache):
    lease = await cache.acquire("loading", prompt(7, 2, tail=1))
    assert lease.pending
    return Step(lease, [1], BLOCK), NotReady


async def chunked(cache):
    lease = await cache.acquire("chunked", prompt(8, 5), chunk_tokens=BLOCK)
    return Step(lease, (), 2 * BLOCK), ValueError


async def chunked_and_extended(cache):
    step, error = await chunked(cache)
    return Step(step.lease, [1], 2 * BLOCK), error


async def busy(cache):
    lease = await cache.acquire("busy", [1])
    lease._handle.begin_change("fork")
    return Step(lease, [1]), LeaseBusy


@pytest.mark.parametrize("at", [0, 2, 5])
@pytest.mark.parametrize("batch", [2, 256])
@pytest.mark.parametrize("bad", [ended, too_large, loading, chunked, chunked_and_extended, busy])
async def test_an_error_concerns_its_lease_alone(bad, batch, at, monkeypatch):
    monkeypatch.setattr(steps_module, "BATCH_LEASES", batch)
    async with opened(device=24, host=HOST) as cache:
        await serve(cache, "stored", prompt(7, 2, tail=1))
        await serve(cache, "other", prompt(2, 24))
        leases = await acquired(cache, 5)
        step, error = await bad(cache)
        before = step.lease.num_tokens
        steps = [Step(one, [1], BLOCK) for one in leases]
        steps.insert(at, step)
        outcomes = await cache.step(steps)
        assert isinstance(outcomes.pop(at).error, error)
        for lease, outcome in zip(leases, outcomes, strict=True):
            assert outcome == Stepped(lease.block_table[1:], 1)
        step.lease._handle.changing = ""
        assert step.lease.num_tokens == before
        for lease in [*leases, step.lease]:
            if not lease._handle.ended:
                await lease.wait_ready()
                assert agree(cache, lease)
                await lease.truncate(lease.num_tokens)
                await lease.finish()


@pytest.mark.parametrize("kind", ["list", "numpy", "steps", "media"])
async def test_arguments_are_copied_at_the_call(kind):
    """The caller prepares its next step while this one waits for its event."""
    async with opened(device=32) as cache:
        lease, other = await acquired(cache, 2)
        tokens = np.array([5] * BLOCK) if kind == "numpy" else [5] * BLOCK
        media = [(0, 2, b"image")] if kind == "media" else ()
        steps, event = (
            [Step(lease, tokens, None, media)],
            asyncio.get_running_loop().create_future(),
        )
        task = asyncio.ensure_future(cache.step(steps, event=event))
        await asyncio.sleep(0)
        if kind == "steps":
            steps[0] = Step(other, [6])
            steps.append(Step(lease, [6]))
        elif kind == "media":
            media[0] = (1, 3, b"another")
        else:
            tokens[0] = 6
        await lease.extend([4] * BLOCK)  # positions are of the time after the event
        event.set_result(None)
        assert await task == [Stepped(lease.block_table[2:], 0)]
        whole = [*prompt(100, 1), *[4] * BLOCK, *[5] * BLOCK]
        items = ((2 * BLOCK, 2, b"image"),) if kind == "media" else ()
        twin = await cache.acquire("twin", whole, extra_keys=items)
        assert lease.hashes(0, 3) == twin.hashes(0, 3)
        for one in (lease, other, twin):
            assert agree(cache, one)
            await one.finish()


@pytest.mark.parametrize("call", ["extend", "reserve", "truncate", "fork", "step"])
async def test_no_call_slips_in_during_a_step(call, queued):
    """Leases that wait for an eviction, and one whose step has happened already."""
    calls = {
        "extend": lambda lease: lease.extend([7]),
        "reserve": lambda lease: lease.reserve(1),
        "truncate": lambda lease: lease.truncate(0),
        "fork": lambda lease: lease.fork("fork"),
    }
    async with opened(device=8, host=HOST) as cache:
        leases = await acquired(cache, 3)
        await serve(cache, "other", prompt(2, 5))
        tokens = [[1], [2] * (2 * BLOCK), [3] * (2 * BLOCK)]
        media = [(), ((0, 2, b"image"),), ()]
        steps = [Step(*one) for one in zip(leases, tokens, [None] * 3, media, strict=True)]
        task = asyncio.ensure_future(cache.step(steps))
        await asyncio.sleep(0)
        refused = 0
        while not task.done():
            for lease in leases:
                if task.done():
                    break
                if call == "step":
                    [found] = await cache.step([Step(lease, [7])])
                    error = found.error
                else:
                    with pytest.raises(LeaseBusy) as raised:
                        await calls[call](lease)
                    error = raised.value
                assert isinstance(error, LeaseBusy)
                refused += 1
            await asyncio.sleep(0)
        assert refused > len(leases)
        assert [one.error for one in await task] == [None] * 3
        for lease in leases:
            assert agree(cache, lease)
            await lease.finish()


async def test_wrong_steps_are_refused_and_change_nothing():
    async with opened(device=16) as cache, opened(device=4) as second:
        lease, other = await acquired(cache, 2)
        foreign = await second.acquire("x", [1])
        good = Step(other, [1])
        for wrong, error, match in (
            (5, TypeError, "steps must be a list"),
            ("steps", TypeError, "steps must be a list"),
            ([lease], TypeError, r"steps\[0\] must be a Step, not Lease"),
            ([good, Step("lease")], TypeError, r"steps\[1\].lease must be a Lease"),
            ([good, Step(foreign)], ValueError, r"steps\[1\].lease is of another cache"),
            ([good, Step(other)], ValueError, "twice"),
            ([good, Step(lease, [-1])], ValueError, "token ids"),
            ([good, Step(lease, "a")], TypeError, r"steps\[1\].tokens"),
            ([good, Step(lease, [1], BLOCK + 2)], ValueError, "computed_tokens must be between"),
            ([good, Step(lease, [1], 1.0)], TypeError, "computed_tokens must be an int"),
            ([good, Step(lease, [1], None, [(0, 2, "cat")])], ValueError, "extra_keys"),
        ):
            with pytest.raises(error, match=match):
                await cache.step(wrong)
        assert await cache.step([]) == []
        assert (lease.num_tokens, other.num_tokens) == (BLOCK, BLOCK)
        for one in (lease, other, foreign):
            await one.extend([1])
            await one.finish()


async def test_a_step_cancelled_anywhere_did_not_happen_or_ended_each_lease():
    outcomes = set()
    for passes in range(40):
        async with opened(device=12, host=HOST) as cache:
            leases = await acquired(cache, 4)
            await serve(cache, "other", prompt(2, 7))
            task = asyncio.ensure_future(
                cache.step([Step(one, [1] * (n * BLOCK), BLOCK) for n, one in enumerate(leases)])
            )
            for _ in range(passes):
                await asyncio.sleep(0)
            done = task.done()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            counts = [lease.num_tokens for lease in leases]
            await cache.wait_idle()
            assert counts == [lease.num_tokens for lease in leases]
            for n, lease in enumerate(leases):
                alive = agree(cache, lease)
                outcomes.add(alive)
                assert not alive or done or lease.num_tokens == BLOCK, n
                if alive:
                    await lease.extend([6])
                    await lease.finish(0)
        if done:
            break
    assert outcomes == {True, False}
