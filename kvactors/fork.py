"""Guard against using a parent's caches in a forked child.

A child has the parent's memory, files and sockets, but not its threads. Its event loop shares the
parent's epoll instance. Every call in the child raises CacheClosed. The end of an `async with`
block closes nothing there, and an exception of the block propagates.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

from kvactors.native import register_at_fork

FORKED = "this cache was opened before a fork, in the parent process: open another one in the child"

SYSTEMS: WeakSet[Any] = WeakSet()
"""What runs in this process and has `close_in_child()`, called in the child before the fork returns
there."""


def _close_in_child() -> None:
    for system in list(SYSTEMS):
        system.close_in_child()


register_at_fork(after_in_child=_close_in_child)
