"""What sinks are to be sent, computed from the tiers."""

from __future__ import annotations

from kvactors.flush_notifier.view import SinkFilter
from kvactors.observe.statistics import residency
from kvactors.system import System
from kvactors.tables import ShardedDict
from kvactors.types import ALL_TIERS, Tier

PER_TIER = SinkFilter(int(ALL_TIERS), node=False, at_finish=False)
"""Filter of a sink that receives every event immediately, with each tier separate."""


def announceable(system: System, sink: SinkFilter = PER_TIER) -> dict[Tier, set[bytes]]:
    """The keys of each tier that a sink with this filter is sent."""
    found: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
    where = residency(system)
    for block_hash, _, tiers in system.notifier_actor.ledger.announceable(
        sink, where, ShardedDict()
    ):
        for tier in Tier:
            if tiers & tier:
                found[tier].add(block_hash)
    return found
