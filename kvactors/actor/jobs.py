"""Child jobs of an actor: slow work beside its turns, whose outcome comes back as a message."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from kvactors.actor.in_flight import InFlight
from kvactors.actor.message import Control
from kvactors.errors import as_exception

T = TypeVar("T")

JOB_LIMIT, MEMORY_LIMIT = 5.0, 60.0
"""Seconds in which a job must end after its actor failed: any job, and one that accesses memory
which cannot be withheld from reuse."""


class Job(NamedTuple):
    """counted: whether it counts as in flight. slots, keys: host slots that it accesses, and blocks
    that it is about."""

    counted: bool
    slots: Sequence[int]
    keys: bytes


class JobBroken(Control, frozen=True, eq=False):
    """The completion of a job could not be built: the actor fails."""

    error: Exception


class JobsRunOn(RuntimeError):
    """Jobs of a failed actor access memory and do not end: no actor may hand out that memory
    again."""


class Jobs:
    """The running jobs of one incarnation of an actor.

    Args:
        deliver: sends the actor the message with a job's outcome.
    """

    __slots__ = ("_deliver", "_in_flight", "_name", "running")

    def __init__(self, actor: str, in_flight: InFlight, deliver: Callable[[Control], None]) -> None:
        self.running: dict[asyncio.Task[None], Job] = {}
        self._name = actor + JOB
        self._in_flight = in_flight
        self._deliver = deliver

    def start(
        self,
        work: Coroutine[Any, Any, T],
        done: Callable[[T], Control],
        failed: Callable[[Exception], Control],
        job: Job,
    ) -> None:
        """Run `work` in a task. See `Context.start_job`."""
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._run(work, done, failed), name=self._name)
        self.running[task] = job
        if job.counted:
            self._in_flight.begin()
        task.add_done_callback(self._ended)
        # The coroutine of a task that was cancelled before its first step is still open.
        task.add_done_callback(lambda _: work.close())

    async def end(self, limit: float | None) -> None:
        """Cancel every job and wait until all have ended, for at most `limit` seconds. Those that
        have not are still in `running` afterwards."""
        for task in list(self.running):
            task.cancel()
        if self.running:
            await asyncio.wait(list(self.running), timeout=limit)

    def abandon(self) -> dict[asyncio.Task[None], Job]:
        """Stop counting the running jobs as in flight. Returns them."""
        late = dict(self.running)
        self._in_flight.end(sum(job.counted for job in late.values()))
        self.running = {task: job._replace(counted=False) for task, job in late.items()}
        return late

    async def _run(
        self,
        work: Coroutine[Any, Any, T],
        done: Callable[[T], Control],
        failed: Callable[[Exception], Control],
    ) -> None:
        try:
            message: Control = done(await work)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a job's failure is a message like any other
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                raise
            message = _failure(as_exception(error), failed)
        self._deliver(message)

    def _ended(self, task: asyncio.Task[None]) -> None:
        job = self.running.pop(task, None)
        if job is not None and job.counted:
            self._in_flight.end()
        if not task.cancelled():
            task.exception()  # Ctrl-C or an exit, which the loop itself has raised


JOB = "'s job"


def is_job(task: asyncio.Task[Any]) -> bool:
    """Whether a task is an actor's job: its name is the actor's name followed by `JOB`."""
    return task.get_name().endswith(JOB)


def _failure(error: Exception, failed: Callable[[Exception], Control]) -> Control:
    try:
        return failed(error)
    except Exception as second:  # without an answer the work would stay in flight without end
        return JobBroken(second)
