"""Finds calls of a manager that overlap."""

from __future__ import annotations

import threading
from threading import get_ident
from types import TracebackType

from kvactors.errors import WrongThread

NONE = 0


class Turns:
    """One call at a time, from any thread. It makes no call wait: the engine's lock does."""

    def __init__(self) -> None:
        self._thread = NONE
        self._depth = 0

    def __enter__(self) -> None:
        """A call begins.

        Raises:
            WrongThread: a call of another thread has not ended.
        """
        ident = get_ident()
        if self._thread not in (NONE, ident):
            raise WrongThread(
                f"{threading.current_thread().name} calls the manager during a call of another "
                "thread: all calls but write_cache_to_storage need the scheduler's lock"
            )
        self._thread = ident
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._thread = NONE
