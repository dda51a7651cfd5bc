"""One decode step of many leases: every lease is as if it were extended and committed alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvactors.decode_batch import Step, Stepped
from kvactors.prefix_index.messages import StepLeases
from tests.support.cache import BLOCK, opened, prompt, serve


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


@pytest.mark.parametrize("kind", ["list", "numpy", "steps"])
async def test_arguments_are_copied_at_the_call(kind):
    """The caller prepares its next step while this one waits for its event."""
    async with opened(device=32) as cache:
        lease, other = await acquired(cache, 2)
        tokens = np.array([5] * BLOCK) if kind == "numpy" else [5] * BLOCK
        steps, event = [Step(lease, tokens)], asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(cache.step(steps, event=event))
        await asyncio.sleep(0)
        if kind == "steps":
            steps[0] = Step(other, [6])
            steps.append(Step(lease, [6]))
        else:
            tokens[0] = 6
        await lease.extend([4] * BLOCK)  # positions are of the time after the event
        event.set_result(None)
        assert await task == [Stepped(lease.block_table[2:], 0)]
        whole = [*prompt(100, 1), *[4] * BLOCK, *[5] * BLOCK]
        twin = await cache.acquire("twin", whole)
        assert lease.hashes(0, 3) == twin.hashes(0, 3)
        for one in (lease, other, twin):
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
        ):
            with pytest.raises(error, match=match):
                await cache.step(wrong)
        assert await cache.step([]) == []
        assert (lease.num_tokens, other.num_tokens) == (BLOCK, BLOCK)
        for one in (lease, other, foreign):
            await one.extend([1])
            await one.finish()
