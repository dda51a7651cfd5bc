"""The time that actors take in one pass of the event loop.

A pass runs every callback that is ready. Under load each of several actors has messages, and their
turns together would delay the loop's other callbacks, although each actor yields soon.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from kvactors.actor.direct import choice_of

PASS_TIME = 0.0001
"""Seconds from the first turn of a pass. An actor with a message steps aside after that."""

ASIDE = 2
"""Passes for which it steps aside. In the next one, callbacks of timers run behind those that were
ready before: an actor among these would delay them once more."""


class PassTime:
    """The turns of all actors of an event loop in the present pass. It does not refer to the loop,
    which would stay in memory for it."""

    __slots__ = ("_begun", "_until")

    def __init__(self) -> None:
        self._begun, self._until = False, 0.0

    def is_over(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether the time of this pass of the loop is over. Asked before each turn of an actor."""
        now = loop.time()
        if self._begun:
            return now > self._until
        self._begun, self._until = True, now + PASS_TIME
        loop.call_soon(self._end)
        return False

    def _end(self) -> None:
        self._begun = False


_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, PassTime] = WeakKeyDictionary()


def pass_time_of(loop: asyncio.AbstractEventLoop) -> PassTime | None:
    """The actors of several caches on one loop share its passes. None on a loop of virtual time,
    where a pass takes no time."""
    if choice_of(loop) is not None:
        return None
    found = _of_loops.get(loop)
    if found is None:
        found = _of_loops[loop] = PassTime()
    return found
