"""Fresh memory, brought in by several threads before it is used."""

from __future__ import annotations

import asyncio
import os
from _thread import get_ident
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from kvactors.actor.uncancelled import wait_uncancelled
from kvactors.threads import Workers

PIECE = 64 << 20
"""Bytes touched between two checks for a stop."""

MOST_THREADS = 16
"""Threads at most: the system clears pages no faster with more."""


class Fresh(Protocol):
    """An owner of memory that was not used yet."""

    def touch(self) -> None:
        """Fault in every page. Several threads may call this at once, and share the work."""

    def stop_touching(self) -> None:
        """Make every `touch` return after its current piece."""


class FreshMemory:
    """Ranges of memory in pieces, each of which one thread touches.

    Args:
        ranges: address and bytes of each.
        touch: faults in one piece.

    Attributes:
        stopped: no further piece is touched.
    """

    def __init__(
        self, ranges: Iterable[tuple[int, int]], touch: Callable[[int, int], object]
    ) -> None:
        self.stopped = False
        self._touch = touch
        self._threads: set[int] = set()
        self._left = deque(
            (address + start, min(PIECE, size - start))
            for address, size in ranges
            for start in range(0, size, PIECE)
        )

    @property
    def busy(self) -> bool:
        """Whether a thread touches a piece now."""
        return bool(self._threads)

    def stop_touching(self) -> None:
        """See `Fresh`."""
        self.stopped = True

    def touch(self) -> None:
        """Touch pieces until none is left. Each call takes those that no other has taken."""
        thread = get_ident()
        self._threads.add(thread)  # before the check: the memory may be freed once no thread is in
        try:
            while self._left and not self.stopped:
                try:
                    piece = self._left.popleft()
                except IndexError:  # another thread took the last one
                    return
                self._touch(*piece)
        finally:
            self._threads.discard(thread)


async def bring_in(owner: Fresh, *, inline: bool) -> None:
    """Touch an owner's memory in threads of low priority, one for each core. A cancellation ends
    this after the current pieces. inline: in the loop's thread, for loops of virtual time."""
    if inline:
        owner.touch()
        return
    count = min(len(os.sched_getaffinity(0)), MOST_THREADS)
    workers = Workers(count, "kvactors-touch")
    calls = [asyncio.wrap_future(workers.submit(owner.touch)) for _ in range(count)]
    workers.close()
    await wait_uncancelled(asyncio.gather(*calls), owner.stop_touching)
