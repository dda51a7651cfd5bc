"""Channel: two lanes, a bound, and no item lost or doubled under any cancellation."""

from __future__ import annotations

import asyncio
from collections import Counter

import anyio
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kvactors.actor import Channel
from kvactors.errors import ChannelClosed
from kvactors.testing.loop import simulate


@pytest.fixture(params=["stdlib", "uvloop"], autouse=True)
def on_both_loops(request):
    """Every test of this file that calls `run` runs on both loops."""
    request.node.loop_factory = (
        asyncio.new_event_loop if request.param == "stdlib" else uvloop.new_event_loop
    )
    return request.node.loop_factory


@pytest.fixture
def run(on_both_loops):
    def runner(main):
        with asyncio.Runner(loop_factory=on_both_loops) as loop:
            return loop.run(main())

    return runner


def test_control_overtakes_data_and_each_lane_keeps_order(run):
    async def main():
        channel = Channel("c", 4)
        for i in range(3):
            await channel.put(i)
        channel.put_control("x")
        channel.put_control("y")
        return [await channel.get() for _ in range(5)]

    assert run(main) == ["x", "y", 0, 1, 2]


def test_a_full_lane_makes_senders_wait_in_order(run):
    async def main():
        channel = Channel("c", 1)
        await channel.put(0)
        senders = [asyncio.create_task(channel.put(i)) for i in (1, 2)]
        await asyncio.sleep(0)
        assert channel.statistics().senders_waiting == 2
        assert not channel.try_put(9)
        got = [await channel.get() for _ in range(3)]
        await asyncio.gather(*senders)
        return got

    assert run(main) == [0, 1, 2]


@pytest.mark.parametrize("bound", [1, 2, 8])
def test_no_sender_overtakes_one_that_waits(run, bound):
    """Senders come in one pass of the loop and one in each of the next. A sender that finds the
    channel idle would reach the receiver without a lane."""

    async def main():
        channel, called, got, waiting = Channel("c", bound), [], [], 0

        async def send(item):
            nonlocal waiting
            for _ in range(max(0, item - 40)):
                await asyncio.sleep(0)
            assert not (channel.idle and waiting)
            called.append(item)
            waiting += 1
            await channel.put(item)
            waiting -= 1

        async def receive():
            while True:
                got.append(await channel.get())

        receiver = asyncio.create_task(receive())
        await asyncio.gather(*map(send, range(80)))
        await asyncio.sleep(0)
        receiver.cancel()
        assert got == called

    run(main)


def test_close_wakes_everybody(run):
    async def main():
        channel = Channel("c", 1)
        await channel.put(0)
        sender = asyncio.create_task(channel.put(1))
        await asyncio.sleep(0)
        channel.close()
        with pytest.raises(ChannelClosed):
            await sender
        assert await channel.get() == 0
        with pytest.raises(ChannelClosed):
            await channel.get()
        with pytest.raises(ChannelClosed):
            channel.put_control(2)

    run(main)


@pytest.mark.parametrize("bound", [0, -1])
def test_bad_channels_are_refused(bound):
    with pytest.raises(ValueError):
        Channel("c", bound)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("cancel_first", [True, False])
def test_cancelling_a_parked_receiver_loses_nothing(run, native, cancel_first):
    async def main():
        channel, got, scope = Channel("c", 2), [], anyio.CancelScope()

        async def receive():
            with scope:
                got.append(await channel.get())

        task = asyncio.create_task(receive())
        for _ in range(3):
            await asyncio.sleep(0)
        cancel = task.cancel if native else scope.cancel
        for act in (
            (cancel, lambda: channel.try_put(1))
            if cancel_first
            else (lambda: channel.try_put(1), cancel)
        ):
            act()
        await asyncio.gather(task, return_exceptions=True)
        return len(got) + len(channel)

    assert run(main) == 1


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    bound=st.integers(1, 3),
    cancels=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 12)), max_size=8),
)
def test_exactly_once_under_cancellation_anywhere(seed, bound, cancels):
    """Senders and receivers come and go. An item whose send was not confirmed is not delivered, and
    the others arrive exactly once."""

    async def main():
        channel, sent, got = Channel("c", bound), [], []

        async def send(item):
            await channel.put(item)
            sent.append(item)

        async def receive():
            while True:
                got.append(await channel.get())

        tasks = [asyncio.create_task(send(i)) for i in range(7)]
        receiver = asyncio.create_task(receive())
        for step in range(13):
            for who, when in cancels:
                if when == step:
                    if who < 7:
                        tasks[who].cancel()
                    else:
                        receiver.cancel()
                        await asyncio.gather(receiver, return_exceptions=True)
                        receiver = asyncio.create_task(receive())
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        receiver.cancel()
        await asyncio.gather(receiver, *tasks, return_exceptions=True)
        rest = list(channel.purge())
        assert Counter(got + rest) == Counter(sent)
        assert channel._granted == 0

    simulate(main, seed)


def test_an_actors_own_work_and_the_data_lane_take_turns():
    channel: Channel[str] = Channel("c", 8)
    for number in range(3):
        channel.try_put(f"data {number}")
        channel.put_later(f"step {number}")
    channel.put_control("control")
    assert channel.statistics().control == 4
    taken = [channel.get_nowait() for _ in range(7)]
    assert taken == ["control", "step 0", "data 0", "step 1", "data 1", "step 2", "data 2"]
    for number in range(2):
        channel.put_later(f"step {number}")
    assert [channel.get_nowait() for _ in range(3)] == ["step 0", "step 1", None]
    channel.close()
    with pytest.raises(ChannelClosed):
        channel.put_later("too late")
