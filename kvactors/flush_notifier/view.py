"""What a sink wants to hear of a block's residency."""

from __future__ import annotations

from typing import NamedTuple

from kvactors.types import ALL_TIERS, Tier

SHIFT = 3
"""Bits of a set of tiers."""

ABOVE_ALL = int(ALL_TIERS)
"""Stands for what is due of the block above the first block of a path."""


class SinkView(NamedTuple):
    """What a sink wants to hear. tiers: of which, a set. node: as one fact, resident while any of
    them holds the block; it is told as Tier.DEVICE, whichever tier it is. at_finish: gains are due
    when a request that covers the block finishes, losses at once; otherwise both at once.
    by_tokens: it addresses blocks by tokens alone, so it gets only those that tokens alone
    identify."""

    tiers: int
    node: bool
    at_finish: bool
    by_tokens: bool = False

    def table(self) -> tuple[int, ...]:
        """By the set of tiers that hold a block: the set that the sink's view should have, if
        nothing above the block matters."""
        sets = (tiers & self.tiers for tiers in range(ALL_TIERS + 1))
        return tuple(int(Tier.DEVICE) * bool(tiers) if self.node else tiers for tiers in sets)

    def closed(self) -> tuple[int, ...]:
        """By what is due of the block above, shifted by SHIFT, and the set of tiers that hold a
        block: what is due of the block. Nothing if the block above is nowhere; DEVICE only if the
        block above is on DEVICE. ABOVE_ALL in place of what is due of the block above: there is
        none."""
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
