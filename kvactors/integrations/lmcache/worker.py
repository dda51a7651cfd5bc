"""The thread that owns the objects and the tasks in flight.

LMCache's threads hand calls over and take results. One thread makes every decision, so nothing is
shared.
"""

from __future__ import annotations

import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

from kvactors.actor.log import described, get_logger
from kvactors.integrations.lmcache.catalog import Catalog
from kvactors.integrations.lmcache.key_log import KeyLog
from kvactors.integrations.lmcache.object_store import ObjectStore, Report
from kvactors.tier_cache import SlotMemory, StorageTier

T = TypeVar("T")

log = get_logger()


class Worker:
    """Runs calls and results in one thread. `post` and `ask` may be called in any thread.

    Args:
        tier: the store of the pages, open, with an event descriptor.
        keys: the file of the keys, open.
        catalog: the objects in the store.
        report: receives results, in the worker's thread.
        staging: memory that pages pass through.

    Attributes:
        objects: the objects and tasks. Its methods are called in the worker's thread.
    """

    def __init__(
        self,
        tier: StorageTier,
        keys: KeyLog,
        catalog: Catalog,
        report: Report,
        staging: SlotMemory,
    ) -> None:
        self.objects = ObjectStore(tier, keys, catalog, report, self.post, staging)
        self._tier = tier
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)  # other threads may write to it until then
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvactors-lmcache", daemon=True)

    # -- any thread

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Run a call in the worker's thread."""
        self._commands.append(call)
        os.eventfd_write(self._wake, 1)

    def ask(self, call: Callable[[], T], limit: float, otherwise: T) -> T:
        """Run a call in the worker's thread, and return its result, or `otherwise` after `limit`
        seconds."""
        if threading.current_thread() is self._thread:
            return call()
        answer: Future[T] = Future()
        self.post(partial(_answer, answer, call))
        try:
            return answer.result(limit if self._thread.is_alive() else 0.0)
        except TimeoutError:
            return otherwise

    def stop(self, limit: float) -> bool:
        """End the thread. Tasks in flight fail. Returns whether it has ended after `limit`
        seconds."""
        if self._thread.is_alive():
            self.post(self._stop)
            self._thread.join(limit)
        if self._thread.is_alive():
            return False
        self.objects.close(limit)
        return True

    @property
    def running(self) -> bool:
        """Whether the thread takes calls."""
        return self._thread.is_alive() and not self._stopped

    # -- the thread

    def _stop(self) -> None:
        self._stopped = True

    def _run(self) -> None:
        poll = select.poll()
        descriptors = [self._wake] if self._tier.fd is None else [self._wake, self._tier.fd]
        for fd in descriptors:
            poll.register(fd, select.POLLIN)
        while not self._stopped:
            poll.poll(self._patience())
            for fd in descriptors:
                with suppress(BlockingIOError):
                    os.eventfd_read(fd)
            self._turn()
        self._run_commands()
        tasks = self.objects.tasks
        for task in list(tasks.values()):
            self._contain(self.objects.give_up, task)
        self._contain(self.objects.settle)
        for task in list(tasks.values()):
            self._contain(self.objects.end_task, task)

    def _patience(self) -> int | None:
        """Milliseconds until the next deadline, None without tasks."""
        if not self.objects.tasks:
            return None
        next_deadline = min(task.deadline for task in self.objects.tasks.values())
        return max(0, int((next_deadline - time.monotonic()) * 1000) + 1)

    def _turn(self) -> None:
        self._run_commands()
        for result in self._tier.poll():
            self._contain(self.objects.job_ended, result)
        now = time.monotonic()
        for task in [task for task in self.objects.tasks.values() if task.deadline <= now]:
            self._contain(self.objects.give_up, task)
        self._contain(self.objects.fill)
        self._contain(self.objects.settle)

    def _run_commands(self) -> None:
        while self._commands:
            self._contain(self._commands.popleft())

    @staticmethod
    def _contain(call: Callable[..., None], *arguments: object) -> None:
        try:
            call(*arguments)
        except Exception as error:
            log.error("LMCache call failed", call=str(call), error=described(error))


def _answer(answer: Future[T], call: Callable[[], T]) -> None:
    try:
        answer.set_result(call())
    except Exception as error:
        answer.set_exception(error)
