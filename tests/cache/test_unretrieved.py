"""A call that fails in the step in which its caller is cancelled leaves no exception that asyncio
reports as never retrieved: every step of the loop is a chance."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvactors.errors import KVActorsError
from tests.support.cache import BLOCK, opened, prompt

HOST = {"slots": 8, "transit_slots": 16}
MOST_STEPS = 60


async def fails() -> None:
    await asyncio.sleep(0)
    raise RuntimeError("the work of the device failed")


async def sleep(cache: Any) -> None:
    """Refused: a lease is open."""
    await cache.sleep()


async def commit(cache: Any) -> None:
    """Its event fails."""
    lease = await cache.acquire("b", prompt(2, 2))
    try:
        await lease.commit(2 * BLOCK, event=fails())
    finally:
        await lease.finish()


async def set_num_blocks(cache: Any) -> None:
    """Refused by the work: too much memory."""
    await cache.set_num_blocks(1 << 31)


CALLS: dict[str, tuple[Callable[[Any], Awaitable[None]], int]] = {
    "sleep": (sleep, 8),
    "commit": (commit, 8),
    "set_num_blocks": (set_num_blocks, 0),
}


async def reports_after(step: int, call: Callable[[Any], Awaitable[None]], blocks: int) -> bool:
    """Cancel the call after so many steps. Returns whether it was over by then.

    Raises:
        AssertionError: asyncio has reported something.
    """
    reports: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: reports.append(context))
    try:
        async with opened(device=blocks, host=HOST, inline=True) as cache:
            held = await cache.acquire("a", prompt(1, 2)) if blocks else None
            task = asyncio.ensure_future(call(cache))
            for _ in range(step):
                await asyncio.sleep(0)
            over = task.done()
            task.cancel()
            (found,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(found, asyncio.CancelledError | KVActorsError), found
            if held is not None:
                await held.finish()
            del task, found, held
        gc.collect()
        assert reports == [], (step, [report["message"] for report in reports])
        return over
    finally:
        loop.set_exception_handler(before)


@pytest.mark.parametrize("name", CALLS)
async def test_nothing_is_reported_whenever_the_caller_is_cancelled(name: str) -> None:
    for step in range(MOST_STEPS):
        if await reports_after(step, *CALLS[name]):
            break
    else:
        raise AssertionError(f"{name} takes more than {MOST_STEPS} steps")
    assert step > 1, "the call has steps"
