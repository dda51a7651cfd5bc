"""The changes that one sink is sent: tiers, granularity, when gains are due, and in which form."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvactors.types import ALL_TIERS, Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.sinks.base import Sink

SHIFT = 3
"""Bits of a set of tiers."""

ABOVE_ALL = int(ALL_TIERS)
"""In place of the due state of the block above the first block of a path."""


class SinkFilter(NamedTuple):
    """The changes that one sink is sent. The ledger asks nothing else about a sink.

    Attributes:
        tiers: set of tiers that are reported.
        node: report one fact for all tiers, as Tier.DEVICE: resident while any of them holds the
            block.
        at_finish: gains are due when a request that covers the block finishes, losses immediately.
            Otherwise both are due immediately.
        by_tokens: only blocks that tokens alone identify, see `Sink.by_tokens`.
        by_name: no path tokens, see `Sink.by_name`.
        takes_clear: the removal of everything as one task, see `Sink.takes_clear`.
        announces_full: all blocks of a request at its finish, see `Sink.announces_full`.
    """

    tiers: int
    node: bool
    at_finish: bool
    by_tokens: bool = False
    by_name: bool = False
    takes_clear: bool = False
    announces_full: bool = False

    @classmethod
    def of(cls, sink: Sink) -> SinkFilter:
        """The filter of a sink: its settings and what its class declares."""
        return sink.filter._replace(
            by_name=sink.by_name,
            takes_clear=sink.takes_clear,
            announces_full=sink.announces_full,
        )

    def table(self) -> tuple[int, ...]:
        """By the set of tiers that hold a block: the tiers on which to announce it, without regard
        to the block above."""
        sets = (tiers & self.tiers for tiers in range(ALL_TIERS + 1))
        return tuple(int(Tier.DEVICE) * bool(tiers) if self.node else tiers for tiers in sets)

    def closed(self) -> tuple[int, ...]:
        """The due state of a block, by the due state of the block above, shifted by SHIFT, and the
        set of tiers that hold the block.

        Nothing is due below a block of which nothing is due. DEVICE is due only below a block of
        which DEVICE is due. ABOVE_ALL stands for the block above the first block of a path.
        """
        table = self.table()
        return tuple(
            0
            if not above
            else table[tiers]
            if above & Tier.DEVICE
            else table[tiers] & ~int(Tier.DEVICE)
            for above in range(ALL_TIERS + 1)
            for tiers in range(ALL_TIERS + 1)
        )
