"""The loop's lag tells a slow loop from a busy machine."""

import asyncio
import time

import anyio
import pytest

from kvactors.observe import lag
from kvactors.observe.lag import LagMonitor, Tick, lags_of

LATE = 0.02


def compute():
    """Keep the loop's thread computing."""
    end = time.thread_time() + LATE
    while time.thread_time() < end:
        pass


def block():
    """Keep the loop waiting, without computing."""
    time.sleep(LATE)


async def tick_of(monitor, attribute):
    """The first tick in which a value is high."""
    with anyio.fail_after(30):
        while True:
            for tick in monitor.ticks:
                if getattr(tick, attribute) >= LATE - 0.002:
                    return tick
            await asyncio.sleep(0)


async def worst(call):
    """The latest tick of a loop that makes one call."""
    async with LagMonitor().running() as monitor:
        await asyncio.sleep(0)
        compute()  # in an earlier tick
        await tick_of(monitor, "cpu")
        monitor.take()
        call()
        return await tick_of(monitor, "lag")


def test_a_loop_that_waits_has_no_processor_time():
    assert asyncio.run(worst(compute)).cpu >= LATE
    tick = asyncio.run(worst(block))
    assert tick.lag >= LATE - 0.002
    assert tick.cpu < LATE / 2


def test_waits_for_a_core_are_no_lag_of_the_loop(tmp_path, monkeypatch):
    counters = tmp_path / "schedstat"
    counters.write_text("5 1000000000 7\n")
    monkeypatch.setattr(lag, "SCHEDSTAT", str(counters))

    def starve():
        block()
        counters.write_text("6 1500000000 8\n")

    tick = asyncio.run(worst(starve))
    assert tick.waited == pytest.approx(0.5)
    assert tick.own == 0.0


def test_the_parts_are_taken_tick_by_tick():
    ticks = [Tick(0.010, 0.002, 0.009), Tick(0.001, 0.009, 0.0), Tick(0.0, 0.0, 0.5)]
    found = lags_of(ticks, sees_waits=True)
    assert found["wall"]["p50"] == 1.0
    assert found["own"] == lag.percentiles([0.001, 0.001, 0.0])
    assert found["cpu"] == lag.percentiles([0.002, 0.001, 0.0])
    none = {"p50": 0.0, "p99": 0.0, "p999": 0.0}
    assert lags_of([], sees_waits=False) == {"wall": none, "own": {}, "cpu": none}
