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
        self._start: Callable[[], None] | None = start
        self._catching_up = False

    def adopt(self) -> None:
        """Make the calling thread the owner.

        Raises:
            CacheClosed: the cache is shut down.
        """
        if self.thread == CLOSED:
            raise CacheClosed(self.closed_because)
        start, self._start = self._start, None
        if start is not None:
            start()
        if self.thread != CLOSED:
            self.thread = get_ident()

    def check(self) -> None:
        """Make the calling thread the owner if there is none.

        Raises:
            WrongThread: another thread is.
            CacheClosed: the cache is shut down.
        """
        if self.thread not in (NONE, CLOSED, get_ident()):
            raise WrongThread(
                f"{threading.current_thread().name} does not own this cache: call adopt in it first"
            )
        if self.thread != get_ident():
            self.adopt()

    def hands_over(self, call: Callable[[], object]) -> bool:
        """Whether a call is not the owner's. It waits for the owner then."""
        if self.thread == get_ident() or self.thread == NONE:
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
