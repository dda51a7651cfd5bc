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
        num_blocks: device blocks.
        lifetime: of evicted blocks, from the request that took the block to its eviction.
        idle: of evicted blocks, since the last use.
        gap: of hits on the device, since the last use.
    """

    def __init__(
        self, num_blocks: int, lifetime: Histogram, idle: Histogram, gap: Histogram
    ) -> None:
        self._lifetime = lifetime
        self._idle = idle
        self._gap = gap
        self._taken = np.full(num_blocks, now())
        self._used = self._taken.copy()

    def took(self, blocks: Sequence[int]) -> None:
        """A request has taken free blocks."""
        self._taken[blocks] = self._used[blocks] = now()

    def matched(self, blocks: Sequence[int]) -> None:
        """A request has found these blocks on the device."""
        at = now()
        self._gap.observe_all(at - self._used[blocks])
        self._used[blocks] = at

    def released(self, blocks: Sequence[int]) -> None:
        """A request has ended that used these blocks. Those below 0 are none."""
        self._used[[block for block in blocks if block >= 0]] = now()

    def evicted(self, blocks: Sequence[int]) -> None:
        """These blocks have left the device."""
        at = now()
        self._lifetime.observe_all(at - self._taken[blocks])
        self._idle.observe_all(at - self._used[blocks])
