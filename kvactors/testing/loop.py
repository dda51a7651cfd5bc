"""A seeded asyncio loop of virtual time: a run is replayed exactly from its seed, and sleeping
costs nothing.

Two things are taken away from the loop: the clock, which jumps to the next timer when nothing is
ready, and the order of ready task steps, which is a seeded shuffle. Plain callbacks keep their
order, since asyncio's own machinery relies on it. There are no threads and no sockets in it, and
asking for them is an error. So is waiting without end: `Deadlock` lists each waiting task and the
reason, and `Livelock` the tasks that keep running while the clock stands still."""

from __future__ import annotations

import asyncio
import heapq
import random
import sysconfig
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NoReturn, TypeVar, cast
from weakref import WeakKeyDictionary

import anyio.to_thread

from kvactors.actor import ActorRef, Channel, Context, InFlight
from kvactors.actor.context import JOB, is_job
from kvactors.actor.loop import MailboxLoop
from kvactors.actor.ref import OpenAsks
from kvactors.actor.uncancelled import ThreadWaits

T = TypeVar("T")

SPINS = 100
"""Passes in a row in which nothing ran but anyio's delivery of a cancellation, after which the
clock moves on all the same."""

DEADLINES = frozenset({"LoadDeadline", "JobDeadline", "AdmissionDeadline"})
"""Messages that actors send themselves when a deadline comes."""

TIDY_STEPS = 10_000
"""Steps in which the tasks that are left over must end once they are cancelled."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set, so no waiting task can ever continue. waiting: a line
    for each task, with the reason and the place of its wait."""

    def __init__(self, why: str, waiting: list[str]) -> None:
        super().__init__("\n  ".join([why, *waiting]))
        self.waiting = waiting


class Livelock(RuntimeError):
    """Too many steps ran without the clock moving. running: whose steps were ready at the end."""

    def __init__(self, why: str, running: list[str]) -> None:
        super().__init__("\n  ".join([why, *running]))
        self.running = running


class SimLoop(asyncio.BaseEventLoop):
    """seed: of the order in which ready tasks run. steps: callbacks run so far.

    limit: steps that may run at one instant of virtual time before that is a Livelock, None for any
    number. stalled: the waiting tasks when all tasks last waited for time-outs alone (a deadlock
    but for a deadline), with the time. It is empty if that never happened. direct: share of the
    asks that may be inline turns (see `kvactors.actor.loop`), drawn from the seed as well.
    """

    def __init__(self, seed: int = 0, *, limit: int | None = None, direct: float = 0.0) -> None:
        super().__init__()
        self.seed = seed
        self.steps = 0
        self.limit = limit
        self.stalled: list[str] = []
        self.direct = direct
        self._order = random.Random(seed)  # noqa: S311  (a schedule, not a secret)
        self._direct = random.Random(f"direct {seed}")  # noqa: S311  (so is this)
        self._now = 0.0
        self._standing = 0  # steps at this instant
        self._spins = 0
        self._task_steps, self._stalled_after = 0, -1
        self._numbers: WeakKeyDictionary[asyncio.Task[Any], int] = WeakKeyDictionary()
        self._born = 0

    # -- time

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def jump(self, seconds: float) -> None:
        """The clock leaps forward, as after a machine's sleep: every timer on the way is late.
        ValueError for a negative number."""
        if not seconds >= 0:
            raise ValueError(f"time goes forward only, not by {seconds!r} seconds")
        self._move_to(self._now + seconds)

    def _move_to(self, when: float) -> None:
        if when > self._now:
            self._now, self._standing = when, 0

    def takes_directly(self) -> bool:
        """Whether the next ask may be an inline turn."""
        return self._direct.random() < self.direct

    # -- tasks

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        """See asyncio. A task without a name is called after its coroutine, and all are numbered in
        order of their making."""
        task: asyncio.Task[Any] = super().create_task(coro, **options)
        self._number(task)
        if options.get("name") is None:
            task.set_name(getattr(coro, "__qualname__", "task"))
        return task

    def label(self, task: asyncio.Task[Any]) -> str:
        """A task's label in reports, the same in every run of one seed: the last part of its
        name and its number."""
        return f"{task.get_name().rpartition('.')[2]}#{self._number(task)}"

    def waiting(self) -> list[str]:
        """The waits of unfinished tasks, one line each, in the order of the tasks' creation: the
        task's label, the reason of its wait, and the line of code. Nothing is recorded while the
        loop runs: the text is read from the tasks' frames."""
        lines = []
        for task in sorted(asyncio.all_tasks(self), key=self._number):
            frames = list(frames_of(task))
            who, what = self._who(task, frames), self._what(task, frames)
            lines.append(f"{who} waits for {what} ({site(frames)})")
        return lines

    def _who(self, task: asyncio.Task[Any], frames: list[FrameType]) -> str:
        mailbox = _self_of(frames, MailboxLoop.run.__code__)
        if mailbox is not None:
            return str(mailbox._ref.name)
        if is_job(task):
            return f"a job of {task.get_name().removesuffix(JOB)}"
        for frame in reversed(frames):
            for name in ("message", "self"):
                request = getattr(frame.f_locals.get(name), "request_id", None)
                if request is not None:
                    return f"request {request} ({self.label(task)})"
        return self.label(task)

    def _what(self, task: asyncio.Task[Any], frames: list[FrameType]) -> str:
        for frame in reversed(frames):
            code, found = frame.f_code, cast("Any", frame.f_locals.get("self"))
            if code is ActorRef._answer.__code__:
                message = frame.f_locals["envelope"].message
                return f"the answer to {type(message).__name__} by {found.name}"
            if code is Channel.wait_for_item.__code__:
                if _self_of(frames, MailboxLoop.run.__code__):
                    return "a message"
                return f"a message in {found.name}'s channel"
            if code is Channel.put.__code__:
                return f"a place in {found.name}'s channel"
            if code is InFlight.wait_idle.__code__:
                return f"idle: {found.count} messages or jobs are in flight"
            if code is anyio.to_thread.run_sync.__code__:
                return "a thread, and a loop of virtual time has none"
        return self._other_tasks(task, frames)

    def _other_tasks(self, task: asyncio.Task[Any], frames: list[FrameType]) -> str:
        """The other tasks that a task waits for: in a group, in a gather, or one by name."""
        for frame in reversed(frames):
            if frame.f_code.co_name == "__aexit__":
                group = frame.f_locals.get("self")
                inner = [
                    one
                    for one in getattr(group, "_tasks", ())
                    if isinstance(one, asyncio.Task) and not one.done()
                ]
                if inner:
                    return "its tasks " + ", ".join(sorted(self.label(one) for one in inner))
        future: Any = getattr(task, "_fut_waiter", None)
        children = getattr(future, "_children", [future])
        names = sorted(
            self.label(one) for one in children if isinstance(one, asyncio.Task) and not one.done()
        )
        return "the end of " + ", ".join(names) if names else "a future that nobody completes"

    def _number(self, task: asyncio.Task[Any]) -> int:
        number = self._numbers.get(task)
        if number is None:
            self._born += 1
            number = self._numbers[task] = self._born
        return number

    # -- features that a loop of virtual time lacks

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        raise RuntimeError(
            f"{getattr(func, '__name__', func)!r} needs a thread, and a loop of virtual time has "
            "none"
        )

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """There is nothing to wake."""

    # -- one pass

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready:
            self._nothing_ready([timer for timer in timers if not timer._cancelled])
        elif timers and self._only_cancelling(ready):
            self._move_to(timers[0].when())
        while timers and timers[0].when() <= self._now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        batch = self._shuffled(list(ready))
        ready.clear()
        self._check_limit(batch)
        for handle in batch:
            if not handle._cancelled:
                self.steps += 1
                self._standing += 1
                handle._run()

    def _shuffled(self, batch: list[asyncio.Handle]) -> list[asyncio.Handle]:
        """Task steps in a drawn order, in the places that task steps had. They are sorted before,
        since code that wakes several tasks may do so in the order of a set, which differs between
        runs."""
        places = [i for i, handle in enumerate(batch) if is_task_step(handle)]
        steps = sorted((batch[i] for i in places), key=lambda handle: self._number(task_of(handle)))
        self._order.shuffle(steps)
        self._task_steps += len(steps)
        for i, handle in zip(places, steps, strict=True):
            batch[i] = handle
        return batch

    def _nothing_ready(self, timers: list[asyncio.TimerHandle]) -> None:
        live = [timer for timer in timers if not is_idle(timer)]
        if not live:
            raise Deadlock("nothing is ready and no timer is set", self.waiting())
        # otherwise it is the same stall, in which asks' deadlines were looked at
        if self._stalled_after != self._task_steps and all(is_timeout(timer) for timer in live):
            self._stalled_after = self._task_steps
            since = f"since {self._now:.4f} s everybody waits for time-outs alone"
            self.stalled = [since, *self.waiting()]
        self._move_to(timers[0].when())

    def _only_cancelling(self, ready: Any) -> bool:
        """A cancelled scope of anyio delivers its cancellation again at every pass until it is
        heeded. While a task waits for a timer in the same time (in a shield, for example), the
        clock must advance, as it would on any machine."""
        plain = [handle for handle in ready if not is_task_step(handle)]
        redelivers = any(is_redelivery(handle) for handle in plain)
        self._spins = self._spins + 1 if redelivers else 0
        return self._spins > SPINS

    def _check_limit(self, batch: list[asyncio.Handle]) -> None:
        if self.limit is not None and self._standing > self.limit:
            ready = [task_of(one) for one in batch if is_task_step(one) and not one.cancelled()]
            running = [
                f"{self.label(task)} is ready ({site(list(frames_of(task)))})" for task in ready
            ]
            raise Livelock(
                f"{self._standing} steps at {self._now:.4f} s and the clock has not moved", running
            )


LIBRARY = (
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
)
"""Folders whose code is never shown as the place where a task waits. Installed packages of other
environments are not shown either."""

OURS = str(Path(__file__).parents[1])


def frames_of(task: asyncio.Task[Any]) -> Iterator[FrameType]:
    """The frames a suspended task stands in, outermost first."""
    inner: Any = task.get_coro()
    while inner is not None:
        frame = _first(inner, "cr_frame", "ag_frame", "gi_frame")
        if frame is None:
            return
        yield frame
        inner = _first(inner, "cr_await", "ag_await", "gi_yieldfrom")
        if inner is not None and not hasattr(inner, "cr_frame") and not hasattr(inner, "gi_frame"):
            # an async generator's step hides its generator, but its context manager holds it
            inner = getattr(frame.f_locals.get("self"), "gen", None)


def _first(inner: Any, *names: str) -> Any:
    return next((found for name in names if (found := getattr(inner, name, None))), None)


def site(frames: list[FrameType]) -> str:
    """`file:line` of the innermost frame that is neither of the standard library, nor installed,
    nor kvactors' own. Without such a frame, of the innermost."""
    if not frames:
        return "not started"
    foreign = [
        frame
        for frame in frames
        if not (_path(frame).startswith((*LIBRARY, OURS)) or "site-packages" in _path(frame))
    ]
    frame = (foreign or frames)[-1]
    path = Path(_path(frame))
    short = (
        path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-2:])
    )
    return f"{short}:{frame.f_lineno} in {frame.f_code.co_name}"


def _path(frame: FrameType) -> str:
    return frame.f_code.co_filename


def _self_of(frames: list[FrameType], code: CodeType) -> Any:
    """`self` in the innermost frame of a method, None if the task is not in it."""
    return next(
        (frame.f_locals.get("self") for frame in reversed(frames) if frame.f_code is code), None
    )


def is_task_step(handle: asyncio.Handle) -> bool:
    """Whether a handle is a task's first step or its wake-up, rather than a plain callback."""
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # type: ignore[attr-defined]


def task_of(handle: asyncio.Handle) -> asyncio.Task[Any]:
    """The task that a task step belongs to."""
    return handle._callback.__self__  # type: ignore[attr-defined, no-any-return]


def is_redelivery(handle: asyncio.Handle) -> bool:
    """Whether a handle is anyio's repeated delivery of a cancellation."""
    return getattr(handle._callback, "__name__", "") == "_deliver_cancellation"  # type: ignore[attr-defined]


def is_idle(timer: asyncio.TimerHandle) -> bool:
    """Whether a timer can change nothing: it looks after asks none of which has a deadline."""
    asks = getattr(timer._callback, "__self__", None)  # type: ignore[attr-defined]
    if not isinstance(asks, OpenAsks):
        return False
    return all(envelope.deadline in (None, float("inf")) for envelope in asks.open.values())


def is_timeout(timer: asyncio.TimerHandle) -> bool:
    """Whether a timer is a deadline: of asks, of an actor's operation, of an anyio scope,
    or of asyncio's."""
    callback, args = timer._callback, timer._args  # type: ignore[attr-defined]
    owner, name = getattr(callback, "__self__", None), getattr(callback, "__name__", "")
    if isinstance(owner, Context):
        return type(args[0]).__name__ in DEADLINES
    return isinstance(owner, OpenAsks | ThreadWaits) or name in ("_timeout", "_on_timeout")


def loop_factory(seed: int = 0, *, limit: int | None = None) -> Callable[[], SimLoop]:
    """Makes loops of one seed: for `asyncio.Runner(loop_factory=..)`, pytest-asyncio's
    `pytest_asyncio_loop_factories` hook, and the options of anyio's `anyio_backend` fixture. limit:
    as in SimLoop."""

    def make() -> SimLoop:
        return SimLoop(seed, limit=limit)

    return make


def simulate(
    main: Callable[[], Coroutine[Any, Any, T]], seed: int = 0, *, loop: SimLoop | None = None
) -> T:
    """Run a coroutine function to its end on a new loop (or on `loop`), cancel what it left
    running, and close the loop.

    Deadlock if it can never end, Livelock if the loop has a limit and it only spins.
    """
    loop = loop or SimLoop(seed)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main())
    finally:
        try:
            tidy(loop)
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def tidy(loop: SimLoop) -> None:
    """Cancel every task that is left and let it end, unless it cannot."""
    left = sorted(asyncio.all_tasks(loop), key=loop._number)
    for task in left:
        task.cancel()
    loop.limit, loop._standing = TIDY_STEPS, 0
    with suppress(Deadlock, Livelock):
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
