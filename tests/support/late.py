"""A pytest plugin that lets threads be late, as on a machine with more threads than cores:

    pytest -n 3 -p tests.support.late tests/storage

Calls in threads begin and end late, their results reach the loop late, and now and then a callback
blocks the loop for a moment. A test that fails with it fails on a busy machine, rarely.
LATE_SEED (0) and LATE_SHARE (0.15, of calls that are late) change what happens.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import pytest

from kvactors.native import SlabQueue
from kvactors.storage.file import store as store_module
from kvactors.storage.file.io import SlabIo
from kvactors.threads import Workers

T = TypeVar("T")

SHARE = float(os.environ.get("LATE_SHARE", "0.15"))
VERY_LATE = 1 / 15
"""Part of the late calls that are later than the others by ten times."""
LATE, LATEST = 0.03, 0.3
BLOCKED = 1e-4
"""Share of the loop's callbacks that block it."""

numbers = random.Random(int(os.environ.get("LATE_SEED", "0")) + os.getpid())


def lateness() -> float:
    """Seconds by which the next call is late."""
    drawn = numbers.random() / SHARE if SHARE else 1.0
    if drawn >= 1.0:
        return 0.0
    return numbers.random() * (LATEST if drawn < VERY_LATE else LATE)


def pause() -> None:
    """Be late in a thread."""
    if seconds := lateness():
        time.sleep(seconds)


def late_call(call: Callable[[], T]) -> T:
    """Begin and end a call late."""
    pause()
    try:
        return call()
    finally:
        pause()


class LateSlabIo(SlabIo):
    """Jobs of the native threads of a file store are answered late and out of order."""

    def _collect(self, queue: SlabQueue) -> None:
        for number, codes, records in queue.take_ended():
            future = self._waiting.get(number)
            seconds = lateness()
            if future is None or not seconds or future.get_loop().is_closed():
                self._give(queue, number, codes, records)
            else:
                loop = future.get_loop()
                loop.call_later(seconds, self._give, queue, number, codes, records)
        self._forget(queue)

    def _give(self, queue: SlabQueue, number: int, codes: list[int], records: bytes) -> None:
        future = self._waiting.pop(number, None)
        if future is not None and not future.done() and not future.get_loop().is_closed():
            future.set_result((codes, records))
        self._forget(queue)

    def _forget(self, queue: SlabQueue) -> None:
        if not self._waiting and self._loop is not None:
            self._loop.remove_reader(queue.event_fd)
            self._loop = None


def pytest_configure(config: pytest.Config) -> None:
    """Replace the calls that are to be late, for the whole run."""
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    hand_over, begin = asyncio.BaseEventLoop.call_soon_threadsafe, threading.Thread.run
    submit, step = Workers.submit, asyncio.Handle._run

    def call_soon_threadsafe(loop: Any, *args: Any, **options: Any) -> Any:
        if threading.get_ident() != loop._thread_id:
            pause()
        return hand_over(loop, *args, **options)

    def run(thread: threading.Thread) -> None:
        pause()
        begin(thread)

    def run_callback(handle: Any) -> None:
        if numbers.random() < BLOCKED:
            time.sleep(numbers.random() * LATEST)
        step(handle)

    patch.setattr(asyncio.BaseEventLoop, "call_soon_threadsafe", call_soon_threadsafe)
    patch.setattr(asyncio.Handle, "_run", run_callback)
    patch.setattr(threading.Thread, "run", run)
    patch.setattr(Workers, "submit", lambda pool, call: submit(pool, partial(late_call, call)))
    patch.setattr(store_module, "SlabIo", LateSlabIo)
