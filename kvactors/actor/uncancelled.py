"""Waits and clean-ups that no cancellation interrupts: memory in use by a thread, a shutdown in
progress.

An `anyio.CancelScope(shield=True)` holds off anyio's cancellation only: `Task.cancel`,
`asyncio.timeout` and Ctrl-C under `asyncio.run` pass through it. Code that must reach its end
therefore uses `uncancelled` (a coroutine), `wait_uncancelled` (a future) or `ended` (a task). All
of them raise the cancellation when the work has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from typing import Any, TypeVar

import anyio

T = TypeVar("T")

CANCELLED = (asyncio.CancelledError, GeneratorExit)
"""Raised in a call whose caller has gone: its task was cancelled, or its coroutine was closed."""


class ThreadWaits:
    """The waits of one system for its threads. `abandon` ends those that remain when the time of a
    shutdown is over. abandoned: how many were. Memory that their threads use must stay mapped."""

    def __init__(self) -> None:
        self.abandoned = 0
        self.over = False
        self.end: asyncio.Future[None] | None = None

    def enter(self) -> None:
        """The waits of this task, and of the tasks that it starts, belong to this system."""
        self.end = self.end or asyncio.get_running_loop().create_future()
        _waits.set(self)

    def abandon(self) -> None:
        """End every wait, present and future, with CancelledError."""
        self.over = True
        if self.end is not None and not self.end.done():
            self.end.set_result(None)


_waits: ContextVar[ThreadWaits | None] = ContextVar("kvactors_thread_waits", default=None)


async def uncancelled(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in a task to its end for its result. A cancellation is raised afterwards."""
    task = asyncio.get_running_loop().create_task(work)
    await ended(task)
    return task.result()


async def wait_uncancelled(
    future: asyncio.Future[T], cancelled: Callable[[], None] | None = None
) -> T:
    """The future's result. A cancellation is raised when the future is done: memory in use by a
    thread stays in use until then.

    cancelled: called at the first cancellation, to make the thread's work shorter. CancelledError
    if the system abandons the wait at its shutdown.
    """
    await ended(future, cancelled, _waits.get())
    return future.result()


async def ended(
    future: asyncio.Future[Any],
    notify: Callable[[], None] | None = None,
    waits: ThreadWaits | None = None,
) -> None:
    """Return when a task is done, however. A cancellation of the caller is raised afterwards."""
    if future.done():
        return
    cancelled: BaseException | None = None
    either = [future] if waits is None or waits.end is None else [future, waits.end]
    # Without the shield, a cancelled scope would cancel this task at every step of the loop.
    with anyio.CancelScope(shield=True):
        while not (future.done() or (waits is not None and waits.over)):
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError as error:
                if cancelled is None and notify is not None:
                    notify()
                cancelled = error
            except BaseException:  # Ctrl-C for the second time
                if waits is not None:
                    waits.abandoned += 1
                raise
    if waits is not None and not future.done():
        waits.abandoned += 1
        cancelled = cancelled or asyncio.CancelledError(
            "a thread did not end before the shutdown's deadline"
        )
    if cancelled is not None:
        future.add_done_callback(retrieve)
        raise cancelled


def retrieve(future: asyncio.Future[Any]) -> None:
    """Retrieve the result of a task whose caller may be cancelled when it ends, so that asyncio
    does not log an exception that no caller receives. A callback for when it is done."""
    if not future.cancelled():
        future.exception()
