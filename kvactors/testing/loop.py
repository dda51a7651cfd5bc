"""A seeded asyncio loop of virtual time: a run is replayed exactly from its seed, and sleeping costs nothing.

Two things are taken away from the loop: the clock, which jumps to the next timer when nothing is ready, and the order of ready
task steps, which is a seeded shuffle. Plain callbacks keep their order, since asyncio's own machinery relies on it. There are
no threads and no sockets in it; asking for them is an error.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: whoever waits, waits for ever."""


class SimLoop(asyncio.BaseEventLoop):
    """seed: of the order in which ready tasks run. steps: callbacks run so far."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.steps = 0
        self._order = random.Random(seed)  # noqa: S311  (a schedule, not a secret)
        self._now = 0.0

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> NoReturn:  # type: ignore[override]
        """There are no threads here."""
        raise RuntimeError(f"{getattr(func, '__name__', func)!r} needs a thread, and a loop of virtual time has none")

    def _process_events(self, event_list: Any) -> None:
        """There is no selector."""

    def _write_to_self(self) -> None:
        """There is nothing to wake."""

    def _run_once(self) -> None:
        ready, timers = self._ready, self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
        if not ready:
            if not timers:
                waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
                raise Deadlock(f"nothing is ready and no timer is set; waiting: {', '.join(waiting)}")
            self._now = max(self._now, timers[0].when())
        while timers and timers[0].when() <= self._now:
            timer = heapq.heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        batch = list(ready)
        ready.clear()
        steps = [i for i, handle in enumerate(batch) if is_task_step(handle)]
        shuffled = [batch[i] for i in steps]
        self._order.shuffle(shuffled)
        for i, handle in zip(steps, shuffled, strict=True):
            batch[i] = handle
        for handle in batch:
            if not handle._cancelled:
                self.steps += 1
                handle._run()


def is_task_step(handle: asyncio.Handle) -> bool:
    """Whether a handle is a task's first step or its wake-up, rather than a plain callback."""
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    return isinstance(owner, asyncio.Task) or type(callback).__name__ == "TaskStepMethWrapper"


def simulate(main: Callable[[], Coroutine[Any, Any, T]], seed: int = 0) -> T:
    """Run a coroutine function to its end on a loop of its own. Deadlock if it can never end."""
    loop = SimLoop(seed)
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(main())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
