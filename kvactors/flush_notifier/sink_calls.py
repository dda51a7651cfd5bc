"""Calls of sinks, contained: a sink is foreign code.

Each call runs in its own task, and every exception ends there as a text. No exception of a sink
reaches the notifier, a leaked CancelledError or another BaseException included. KeyboardInterrupt
alone passes. A call that misses its deadline is cancelled and reported as failed immediately. The
next call waits until the task has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from kvactors.actor.log import described, get_logger
from kvactors.errors import KVActorsError, SinkError
from kvactors.flush_notifier.sinks.base import Sink

GRACE = 0.5
"""Seconds in which a cancelled call may end before the cache closes without it."""


async def contained(work: Callable[[], Awaitable[Any]]) -> str:
    """Run foreign code. Returns the text of its exception, empty if there is none."""
    try:
        await work()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return described(error)
    return ""


def start_call(sink: Sink, work: Callable[[], Awaitable[Any]]) -> asyncio.Task[str]:
    """Call a sink in its own task. The result is empty, or the error's text."""
    task = asyncio.get_running_loop().create_task(contained(work), name=f"call of sink {sink.name}")
    sink.call = task
    return task


def error_of(call: asyncio.Task[str]) -> str:
    """The error of a call that has ended, empty if it succeeded."""
    if call.cancelled():
        return "cancelled"
    error = call.exception()
    return call.result() if error is None else repr(error)


async def open_sink(sink: Sink) -> None:
    """Open a sink.

    Raises:
        SinkError: the sink raised another error than those of this package, which pass as they are.
    """
    try:
        await sink.open()
    except (KVActorsError, KeyboardInterrupt):
        raise
    except BaseException as error:
        current = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and (current is None or current.cancelling()):
            raise
        raise SinkError(f"sink {sink.name!r} could not be opened: {described(error)}") from error


async def close_sink(sink: Sink, limit: float) -> None:
    """Let the last call end and close a sink, in about `limit` seconds. Never raises: failures are
    logged."""
    log = get_logger()

    async def work() -> None:
        if sink.call is not None and not sink.call.done():
            sink.call.cancel()
            await asyncio.wait([sink.call])
        await sink.close()

    task = asyncio.get_running_loop().create_task(
        contained(work), name=f"close of sink {sink.name}"
    )
    with anyio.move_on_after(limit):
        await asyncio.wait([task])
    if not task.done():
        task.cancel()
        with anyio.move_on_after(GRACE):
            await asyncio.wait([task])
        log.warning("sink did not close in time", sink=sink.name, seconds=limit)
    elif error := task.result():
        log.warning("sink failed to close", sink=sink.name, error=error)
