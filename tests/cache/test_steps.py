"""One decode step of many leases: every lease is as if it were extended and committed alone."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvactors import steps as steps_module
from kvactors.errors import DeviceError, LeaseBusy, LeaseEnded, NoRoom, NotReady
from kvactors.prefix_index.messages import StepLeases
from kvactors.steps import Step, Stepped
from tests.support.cache import BLOCK, opened, prompt, serve

HOST = {"slots": 8, "transit_slots": 16}


def agree(cache, lease):
    """The lease and the index have the same tokens and blocks, or the lease has ended for both."""
    record = cache.system.index_actor.core.leases.get(lease._hold.id)
    if lease._hold.ended:
        assert record is None
        return False
    assert record.path.num_tokens == lease.num_tokens
    assert tuple(record.path.blocks()) == lease.block_table
    return True


async def acquired(cache, count, blocks=1):
    return [await cache.acquire(f"{n}", prompt(100 + n, blocks)) for n in range(count)]


@pytest.mark.parametrize("batch", [1, 3, 256])
async def test_a_step_is_an_extend_and_a_commit_of_each_lease(batch, monkeypatch):
    monkeypatch.setattr(steps_module, "BATCH", batch)
    async with opened(device=128) as cache:
        rng = random.Random(1)
        batched, single = await acquired(cache, 8), await acquired(cache, 8)
        for _ in range(12):
            more = [[rng.randrange(100) for _ in range(rng.randrange(4))] for _ in batched]
            computed = [rng.choice((None, one.num_tokens)) for one in batched]
            outcomes = await cache.step(
                [Step(*one) for one in zip(batched, more, computed, strict=True)]
            )
            for lease, twin, tokens, count, outcome in zip(
                batched, single, more, computed, outcomes, strict=True
            ):
                added = await twin.extend(tokens)
                if count is not None:
                    assert await twin.commit(count) == outcome.committed_blocks
                assert len(added) == len(outcome.blocks)
                assert outcome.error is None
                assert agree(cache, lease)
                full = lease.num_tokens // BLOCK
                assert lease.hashes(0, full) == twin.hashes(0, full)
        for lease in batched + single:
            await lease.finish()


async def test_one_message_steps_many_leases(monkeypatch):
    sent = []
    async with opened(device=64) as cache:
        leases = await acquired(cache, 20)
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


async def test_an_error_concerns_its_lease_alone():
    async with opened(device=8, host=HOST) as cache:
        await serve(cache, "stored", stored := prompt(7, 2, tail=1))
        await serve(cache, "other", prompt(2, 8))
        ended, fine, full = await acquired(cache, 3)
        await ended.finish()
        loading = await cache.acquire("stored", stored)
        assert loading.pending
        outcomes = await cache.step(
            [
                Step(ended, [1]),
                Step(full, [1] * (BLOCK * 7)),
                Step(fine, [1], BLOCK),
                Step(loading, [1], BLOCK),
            ]
        )
        assert [type(one.error) for one in outcomes] == [LeaseEnded, NoRoom, type(None), NotReady]
        assert outcomes[2] == Stepped(fine.block_table[1:], 1)
        assert (full.num_tokens, loading.num_tokens) == (BLOCK, len(stored))
        for lease in (fine, full, loading):
            await lease.wait_ready()
            assert agree(cache, lease)
            await lease.finish()


async def test_leases_that_wait_for_blocks_do_not_hold_up_the_others():
    """The device is full of cached blocks, whose eviction needs copies."""
    async with opened(device=8, host=HOST) as cache:
        leases = await acquired(cache, 3)
        await serve(cache, "other", prompt(2, 5))
        outcomes = await cache.step([Step(one, [1] * (BLOCK + 1), BLOCK) for one in leases[:2]])
        assert [(len(one.blocks), one.committed_blocks, one.error) for one in outcomes] == [
            (2, 1, None)
        ] * 2
        for lease in leases:
            assert agree(cache, lease)
            await lease.finish()


async def test_long_steps_go_in_parts(monkeypatch):
    monkeypatch.setattr("kvactors.prefix_index.parts.BLOCKS", 2)
    async with opened(device=64) as cache:
        first, second = await acquired(cache, 2)
        outcomes = await cache.step(
            [Step(first, [1] * (9 * BLOCK), 10 * BLOCK), Step(second, [1], BLOCK)]
        )
        assert [one.committed_blocks for one in outcomes] == [10, 1]
        for lease in (first, second):
            assert agree(cache, lease)
            await lease.finish()


async def test_a_lease_that_changes_is_busy_for_a_step_and_the_other_way_round(queued):
    async with opened(device=8, host=HOST) as cache:
        lease, other = await acquired(cache, 2)
        await serve(cache, "other", prompt(2, 6))
        waits = asyncio.ensure_future(lease.extend([2] * (2 * BLOCK)))
        await asyncio.sleep(0)
        busy, fine = await cache.step([Step(lease, [1]), Step(other, [], BLOCK)])
        assert isinstance(busy.error, LeaseBusy)
        assert fine == Stepped((), 1)
        await waits
        steps = asyncio.ensure_future(cache.step([Step(lease, [1])]))
        await asyncio.sleep(0)
        with pytest.raises(LeaseBusy, match="another step"):
            await lease.extend([1])
        await steps
        await lease.extend([1])
        for one in (lease, other):
            await one.finish()


async def test_a_step_waits_for_its_event():
    async with opened(device=16) as cache:
        leases = await acquired(cache, 2)
        future = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(
            cache.step([Step(one, [], BLOCK) for one in leases], event=future)
        )
        await asyncio.sleep(0)
        with pytest.raises(LeaseBusy, match="a commit"):
            await leases[0].truncate(0)
        await leases[1].extend([1])
        future.set_result(None)
        assert [one.committed_blocks for one in await task] == [1, 1]

        async def fail():
            raise RuntimeError("lost")

        with pytest.raises(DeviceError):
            await cache.step([Step(leases[0], [1])], event=fail())
        assert leases[0].num_tokens == BLOCK
        for one in leases:
            await one.finish()


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
            await cache.wait_idle()
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
