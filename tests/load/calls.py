"""How a client calls: tasks that have begun, cancellations, buffers that change."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import numpy as np

from kvactors import Lease

T = TypeVar("T")

PASSES = 12
"""Passes of the loop after which an event completes or a call is cancelled, at most."""


class Cut(Exception):
    """A call was cancelled by the client. It did not happen, or it ended the lease."""


def draw(rng: random.Random, weights: Mapping[str, float]) -> str:
    """A name, by weight."""
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


async def passes(rng: random.Random) -> None:
    """Let a drawn number of passes of the loop go by."""
    for _ in range(rng.choice((0, 1, 2, rng.randrange(PASSES)))):
        await asyncio.sleep(0)


def buffer_of(rng: random.Random, tokens: list[int]) -> Any:
    """Tokens in one of the forms a caller may have them in."""
    forms: tuple[Callable[[list[int]], Any], ...] = (
        list,
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: np.array(tokens, np.uint32),
        lambda tokens: array("Q", tokens),
    )
    return rng.choice(forms)(tokens)


def spoil(buffer: Any) -> None:
    """The caller uses its buffer for other data."""
    for i in range(len(buffer)):
        buffer[i] = 7


async def started(call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task of a call that has taken its first step. A loop of virtual time runs new tasks in a
    drawn order."""
    loop = asyncio.get_running_loop()
    begun: list[bool] = []
    waiter: asyncio.Future[None] = loop.create_future()

    async def work() -> T:
        begun.append(True)
        if not waiter.done():
            waiter.set_result(None)  # its task runs after this step, which begins the call
        return await call

    task = loop.create_task(work())
    try:
        await waiter
    except BaseException:
        task.cancel()
        if begun:
            task.add_done_callback(_end)
        else:
            call.close()
        raise
    return task


def _end(task: asyncio.Task[Any]) -> None:
    """End the lease of a call that was answered before its caller was cancelled."""
    if not task.cancelled() and task.exception() is None and isinstance(task.result(), Lease):
        task.result().abandon()


async def spoiled(call: Coroutine[Any, Any, T], buffer: Any) -> T:
    """Await a call whose caller uses its buffer again once the call has begun."""
    task = await started(call)
    try:
        spoil(buffer)
        return await task
    except asyncio.CancelledError:
        task.add_done_callback(_end)
        raise
    finally:
        task.cancel()


async def cut_soon(rng: random.Random, make: Callable[[], Awaitable[T]]) -> T:
    """Await a call that asyncio cancels after a few passes of the loop, or a time-out does.

    Raises:
        Cut: it was cancelled.
    """
    if rng.random() < 0.3:
        try:
            async with asyncio.timeout(rng.choice((0.0, 0.0001, 0.001))):  # noqa: TID251
                return await make()
        except TimeoutError:
            raise Cut from None
    task = asyncio.ensure_future(make())
    try:
        await passes(rng)
    finally:
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        raise Cut from None
