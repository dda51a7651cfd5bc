"""Victims of the host tier, chosen by the index."""

from __future__ import annotations

from kvactors.cpu_evictor.messages import EvictFirst
from kvactors.native import Path
from kvactors.prefix_index.actions import Action
from kvactors.prefix_index.index import BlockIndex
from kvactors.prefix_index.settings import IndexSettings

MOST = 4096
"""Victims of one message."""


class HostVictims:
    """Names the next victims of the host tier before it is sent blocks to keep.

    The index has the statistics of RETAIN, and every report of the host tier. The host tier evicts
    the victims that it was sent, in this order. A late or lost message costs hits: then the host
    tier evicts the least recently used blocks.
    """

    def __init__(self, index: BlockIndex, settings: IndexSettings) -> None:
        self._index = index
        self._exclusive = settings.exclusive
        self._most, self._low = settings.host_blocks
        self._enabled = index.policy.host

    def before_copies(self, path: Path, start: int, stop: int) -> list[Action]:
        """The host tier is about to take the blocks of a path that it lacks."""
        if not self._enabled:
            return []
        return self.before(self._index.tree.host_lacks(path, start, stop))

    def before(self, incoming: int) -> list[Action]:
        """The host tier is about to take so many blocks, those in flight included."""
        if not self._enabled or not incoming:
            return []
        tree = self._index.tree
        blocks = tree.host_kept(self._exclusive) + incoming
        if blocks <= self._most:
            return []
        victims = tree.host_victims(min(blocks - self._low, MOST))
        return [EvictFirst(victims)] if victims else []
