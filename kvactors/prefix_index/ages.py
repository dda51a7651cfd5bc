"""Ages of device blocks: lifetime, idle time before eviction, and the gap between two uses.

The times of a block are those of its device block. They are kept only while a metric asks for
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvactors.actor.clock import now
from kvactors.histogram import Histogram


class BlockAges:
    """Times at which device blocks were taken and last used, in seconds of the loop's clock.

    Args:
        lifetime: of evicted blocks, from the request that took the block to its eviction.
        idle: of evicted blocks, since the last use.
        gap: of hits on the device, since the last use.
    """

    def __init__(self, lifetime: Histogram, idle: Histogram, gap: Histogram) -> None:
        self._lifetime = lifetime
        self._idle = idle
        self._gap = gap
        self._taken, self._used = np.empty(0), np.empty(0)

    def took(self, blocks: Sequence[int]) -> None:
        """A request has taken free blocks."""
        if max(blocks) >= len(self._taken):
            self._grow(max(blocks) + 1)
        self._taken[blocks] = self._used[blocks] = now()

    def matched(self, blocks: Sequence[int]) -> None:
        """A request has found these blocks on the device."""
        at = now()
        known = self._known(blocks)
        self._gap.observe_all(at - self._used[known])
        self._used[known] = at

    def released(self, blocks: Sequence[int]) -> None:
        """A request has ended that used these blocks. Those below 0 are none."""
        self._used[self._known(blocks)] = now()

    def evicted(self, blocks: Sequence[int]) -> None:
        """These blocks have left the device."""
        at, known = now(), self._known(blocks)
        self._lifetime.observe_all(at - self._taken[known])
        self._idle.observe_all(at - self._used[known])

    def _known(self, blocks: Sequence[int]) -> list[int]:
        """Without blocks that were taken before the ages were asked for."""
        size, taken = len(self._taken), self._taken
        return [block for block in blocks if 0 <= block < size and taken[block] >= 0.0]

    def _grow(self, size: int) -> None:
        """Make place for `size` blocks, twice as many as before at least."""
        more = np.full(max(size, 2 * len(self._taken)) - len(self._taken), -1.0)
        self._taken = np.concatenate((self._taken, more))
        self._used = np.concatenate((self._used, more))
