"""The eviction policy of the device tier: the order of last use, or RETAIN, which learns from the
requests."""

from __future__ import annotations

from collections.abc import Callable

from kvactors.actor.clock import now
from kvactors.native import BlockTree, LifeTables, Path

Clock = Callable[[], float]
"""Seconds, never running backwards."""


class DevicePolicy:
    """Makes the trees of an index, and passes requests and the time on to them.

    Args:
        tables: the statistics of RETAIN, which outlast a clear. None: the policy is LRU.
        clock: of the ages of blocks.
    """

    def __init__(self, tables: LifeTables | None = None, clock: Clock = now) -> None:
        self.tables = tables
        self._clock = clock

    def tree(
        self, block_size: int, capacity: int, *, hashes: bool, touch: bool = True
    ) -> BlockTree:
        """An empty tree. hashes: blocks are hashed when they enter it. touch: bring its memory in
        now."""
        return BlockTree(block_size, capacity, touch, self.tables, eager_hashes=hashes)

    def advance(self, tree: BlockTree) -> None:
        """A request is about to be matched."""
        if self.tables is not None:
            tree.advance(self._clock())

    def end(self, tree: BlockTree, path: Path, output_tokens: int) -> None:
        """A request has ended, and still references its blocks. output_tokens: -1 if not known."""
        if self.tables is not None:
            tree.advance(self._clock())
            tree.touch(path, output_tokens)


def policy_of(name: str, clock: Clock | None = None) -> DevicePolicy:
    """The policy of a name in `device.policy`. clock: the running loop's if None."""
    tables = LifeTables() if name == "retain" else None
    return DevicePolicy(tables, now if clock is None else clock)
