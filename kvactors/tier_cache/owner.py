"""The thread that owns a `TierCache`, and the calls that other threads hand over to it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from threading import get_ident

from kvactors.errors import CacheClosed, WrongThread

log = logging.getLogger("kvactors")

NONE: int = 0
CLOSED: int = -1
"""In the place of the owner's thread: before the first call, and after the last."""


class Owner:
    """The owning thread, and a queue of the calls that other threads make.

    Args:
        start: called once, by the first owner.

    Attributes:
        thread: identifier of the owner, or NONE or CLOSED.
        handed: calls that wait for the owner.
    """

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
            CacheClosed: the cache is shut down.
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
        """Whether the calling thread is the one that starts."""
        return self._first.setdefault("thread", get_ident()) == get_ident()

    def check(self) -> None:
        """Make the calling thread the owner if there is none.

        Raises:
            WrongThread: another thread is.
            CacheClosed: the cache is shut down.
        """
        if self.thread not in (NONE, CLOSED, get_ident()):
            raise self._wrong_thread()
        if self.thread != get_ident():
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

        Each of them is a call of the owner and comes here again: it makes none of the others, which
        would end before it.
        """
        if self._catching_up:
            return
        self._catching_up = True
        try:
            while self.handed:
                self._make(self.handed.popleft())
        finally:
            self._catching_up = False

    def _make(self, call: Callable[[], object]) -> None:
        try:
            call()
        except ValueError as error:  # a fault of the other thread, whose call has returned
            log.error("call of another thread refused: %s", error)

    def close(self, because: str = "") -> bool:
        """No thread owns the cache any more. Returns whether this was the first call."""
        first, self.thread = self.thread != CLOSED, CLOSED
        self.closed_because = because or self.closed_because
        self.handed.clear()
        return first
