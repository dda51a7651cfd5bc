"""When blocks were computed, and which of them a clear must have removed."""

from __future__ import annotations

import asyncio

from tests.load.ground import Part

from .model import Scope

PASSES = 2
"""Passes of the loop in which an answer arrives at its caller."""

EVERYTHING: Part = {}


class History:
    """Numbers of computations: the clears begun before it, and the request that made it.

    After a clear of everything has returned, no block may be hit that was computed before it by a
    request that had ended by then.
    """

    SHIFT = 40

    def __init__(self, begun: int = 0, floor: int = 0) -> None:
        self.begun = begun
        self.floor = floor  # of an earlier process: computations before this clear must not be hit
        self.settled = floor  # the last clear after whose return every earlier grant has arrived
        self.open: set[int] = set()
        self._requests = 0
        self._done: dict[int, tuple[frozenset[int], Part]] = {}

    def request(self) -> int:
        """The number of a request that begins."""
        self._requests += 1
        self.open.add(self._requests)
        return self._requests

    def end(self, request: int) -> None:
        """A request ended."""
        self.open.discard(request)

    def stamp(self, request: int) -> int:
        """The number of a computation of a request, now."""
        return self.begun << self.SHIFT | request

    def clear(self) -> int:
        """A clear of everything begins."""
        self.begun += 1
        return self.begun

    def cleared(self, clear: int, open_at: frozenset[int], part: Part = EVERYTHING) -> None:
        """A clear has returned. open_at: the requests that were open when it began. part: of the
        blocks."""
        self._done[clear] = open_at, part
        while len(self._done) > 256:
            del self._done[min(self._done)]

    async def settle(self) -> None:
        """Let the grants arrive that were given before the last clear returned."""
        cleared = self.snapshot()
        for _ in range(PASSES):
            await asyncio.sleep(0)
        self.settled = cleared

    def open_now(self) -> frozenset[int]:
        """The requests that are open."""
        return frozenset(self.open)

    def snapshot(self) -> int:
        """The last clear that has returned, of which a hit must be younger."""
        return max(self._done, default=self.floor)

    def stale(self, stamp: int, until: int, scope: Scope) -> bool:
        """Whether a block of this computation must have been removed by a clear up to `until` (see
        `snapshot`)."""
        begun, request = stamp >> self.SHIFT, stamp & ((1 << self.SHIFT) - 1)
        if begun < self.floor:
            return True
        return any(
            begun < clear <= until and request not in open_at and scope.is_in(part)
            for clear, (open_at, part) in self._done.items()
        )
