"""The statistics of an index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvactors.prefix_index.records import IndexStatistics

if TYPE_CHECKING:
    from kvactors.prefix_index.core import IndexCore


def statistics_of(core: IndexCore) -> IndexStatistics:
    """A snapshot."""
    tree, leases, evictions = core.index.tree.statistics(), core.leases, core.evictions
    admission = core.admission
    return IndexStatistics(
        requests=leases.requests,
        blocks_looked_up=leases.looked_up,
        device_hits=leases.device_hits,
        host_hits=leases.host_hits,
        storage_hits=leases.storage_hits,
        no_room=admission.no_room,
        refused_size=admission.refused_size,
        refused_pins=admission.refused_pins,
        preempted=core.endings.preempted,
        abandoned=core.endings.abandoned,
        leases=len(leases),
        waiting=len(admission.waiting) + len(admission.space) + len(admission.forking),
        blocks_total=core.index.pool.total,
        blocks_free=core.index.free,
        nodes=tree["nodes"],
        nodes_referenced=tree["referenced"],
        evictable=tree["evictable"],
        evicted=evictions.evicted,
        rescued=evictions.rescued,
        loads_in_flight=len(core.loads),
        offloads_in_flight=len(evictions),
        saves_in_flight=len(core.saves),
        overdue_loads=core.loads.overdue_loads,
        resumed=leases.resumed,
        forks=core.forks.forks,
        tails_copied=core.forks.tails,
        blocks_shared=core.index.pool.num_shared,
        pinned=core.index.tree.pinned,
        pins_refused=core.pins.refused,
        pins_expired=core.pins.expired,
        quota_evictions=core.index.policy.quota_evictions + core.index.tree.quota_evictions,
    )
