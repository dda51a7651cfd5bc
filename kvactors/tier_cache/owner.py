"""The thread that owns a `TierCache`, and the calls that other threads hand over to it."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident

from kvactors.errors import CacheClosed, WrongThread

log = logging.getLogger("kvactors")

NONE: int = 0
CLOSED: int = -1  # in the place of the owner's thread: before the first call, and after the last


class Owner:
    """The owning thread, and a queue of the calls that other threads make."""

    def __init__(self, start: Callable[[], None]) -> None:
        self.thread: int = NONE
        self.handed: deque[Callable[[], object]] = deque()
        self.closed_because = "the cache is shut down"
        self._start = start
        self._started = False
        self._first: dict[str, int] = {}  # the thread that starts: one of several at once
        self._catching_up = False

    def adopt(self) -> None:
        """Make the calling thread the owner.

        Raises:
            WrongThread: another thread opens the cache at this moment.
        """
        if self.thread == CLOSED:
            raise CacheClosed(self.closed_because)
        if not self._started:
            if not self._starts():
                raise self._wrong_thread()
            self._start()
            self._started = True
        if self.thread != CLOSED:
            self.thread = get_ident()

    def _starts(self) -> bool:
        return self._first.setdefault("thread", get_ident()) == get_ident()

    def check(self) -> None:
        if self.thread not in (NONE, CLOSED, get_ident()):
            raise self._wrong_thread()
        self.adopt()

    @staticmethod
    def _wrong_thread() -> WrongThread:
        return WrongThread(
            f"{threading.current_thread().name} does not own this cache: call adopt in it first"
        )

    def hands_over(self, call: Callable[[], object]) -> bool:
        """Whether a call is not the owner's. It waits for the owner then."""
        if self.thread == get_ident() or (self.thread == NONE and self._starts()):
            return False
        if self.thread != CLOSED:
            self.handed.append(call)
        return True

    def catch_up(self) -> None:
        """Make the calls that other threads have handed over, one after another.

        Each of them is a call of the owner and comes here again: it makes none of the others.
        """
        if self._catching_up:
            return
        self._catching_up = True
        try:
            while self.handed:
                try:
                    self.handed.popleft()()
                except ValueError as error:  # a fault of the other thread, whose call has returned
                    log.error("call of another thread refused: %s", error)
        finally:
            self._catching_up = False

    def close(self, because: str = "") -> bool:
        """No thread owns the cache any more. Returns whether this was the first call."""
        first, self.thread = self.thread != CLOSED, CLOSED
        self.closed_because = because or self.closed_because
        self.handed.clear()
        return first


EMPTY_STEP = 0.001  # seconds: a step that computes something takes longer
PAUSE = 0.0002  # seconds after an empty step


class StepPace:
    """Leaves the interpreter to the threads of storage between empty steps.

    An engine whose requests all wait for fetches runs one step after another without a pause. Each
    part of a fetch that is Python code would wait for the interpreter's switch interval (5 ms).
    """

    def __init__(self) -> None:
        self._ended = 0.0

    def step_ended(self) -> None:
        """A step has ended while fetches are in flight. Pause if it was an empty one."""
        now = time.monotonic()
        if now - self._ended < EMPTY_STEP:
            time.sleep(PAUSE)
            now = time.monotonic()
        self._ended = now


AGAIN = 5.0  # seconds for which a key that has waited in vain is a MISS

WAITING = 65_536
"""Keys at most that wait, or have waited in vain. Beyond that the oldest is forgotten."""


class RoomWaits:
    """Bounds the time for which keys wait because no host slot is free.

    A key that has waited in vain is refused for a while, so that an engine which asks in every step
    is not held up again and again.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.refused = 0
        self._since: dict[bytes, float] = {}
        self._until: dict[bytes, float] = {}  # up to when a key is refused

    def __len__(self) -> int:
        return len(self._since)

    def refuses(self, key: bytes, now: float) -> bool:
        """Whether a key has waited in vain a short time ago. If not, its wait begins."""
        until = self._until.get(key)
        if until is not None and now < until:
            return True
        self._until.pop(key, None)
        self._since.setdefault(key, now)
        trim(self._since)
        return False

    def may_wait(self, key: bytes, now: float) -> bool:
        """No slot is free for a key: whether it waits on."""
        if self.refuses(key, now):
            return False
        if now - self._since.get(key, now) < self.patience:
            return True
        self._since.pop(key, None)
        self._until[key] = now + AGAIN
        trim(self._until)
        self.refused += 1
        return False

    def got_slot(self, key: bytes) -> None:
        if self._since or self._until:
            self._since.pop(key, None)
            self._until.pop(key, None)

    def forget_before(self, now: float) -> int:
        """Forget keys that the engine has stopped asking for. Returns how many."""
        before = len(self._since)
        while self._since:
            key, since = next(iter(self._since.items()))
            if now - since < self.patience + AGAIN:
                break
            del self._since[key]
        return before - len(self._since)

    def clear(self) -> None:
        self._since.clear()
        self._until.clear()


def trim(times: dict[bytes, float]) -> None:
    """Forget the oldest entries beyond `WAITING`."""
    while len(times) > WAITING:
        del times[next(iter(times))]
