"""Waiting for what cannot be stopped: a thread in the middle of a copy or a system call."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


async def to_the_end(future: asyncio.Future[T]) -> T:
    """The future's result. Cancelled meanwhile, it waits on and is cancelled then: memory lent to a thread is not given back earlier."""
    cancelled: BaseException | None = None
    while not future.done():
        try:
            await asyncio.shield(future)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break  # the future's own error, raised below
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # nobody else will look at it
        raise cancelled
    return future.result()
