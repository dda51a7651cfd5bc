"""The work after a clear, in parts of a turn."""

from __future__ import annotations

from kvactors.prefix_index.actions import Action
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.messages import Sweep


class Sweeper:
    """Returns the blocks and the memory of cleared trees. Requests do not wait for it:
    `BlockIndex.take` returns what they need.

    Attributes:
        scheduled: whether a part is to come.
    """

    def __init__(self, index: BlockIndex) -> None:
        self.scheduled = False
        self._index = index

    def later(self) -> list[Action]:
        """Continue in a later turn, if there is something to do."""
        if self.scheduled or not self._index.sweeping:
            return []
        self.scheduled = True
        return [Sweep()]

    def step(self) -> list[Action]:
        """A turn's share."""
        self.scheduled = False
        self._index.sweep()
        return self.later()
