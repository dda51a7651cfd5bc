"""What a forked child may do with the caches of its parent: nothing.

A child has the parent's memory, files and sockets, but neither its threads nor a loop of its own:
its loop shares the parent's epoll instance. Every call raises CacheClosed there. The end of an
`async with` block closes nothing, and what the block raised passes.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

FORKED = "this cache was opened before a fork, in the parent process: open another one in the child"


class Forked(Protocol):
    """A system that runs when its process forks."""

    def close_in_child(self) -> None:
        """Called in the child, before the fork returns there."""

    def __hash__(self) -> int: ...


SYSTEMS: WeakSet[Forked] = WeakSet()
"""Those that run in this process."""


def _close_in_child() -> None:
    for system in list(SYSTEMS):
        system.close_in_child()


os.register_at_fork(after_in_child=_close_in_child)
