"""Statistics by salt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvactors.flush_notifier.steps import Steps
from kvactors.observe.statistics import collect
from kvactors.quotas import SaltCount

if TYPE_CHECKING:
    from kvactors.storage.shares import StoreShares
    from kvactors.system import System


class TenantStatistics(msgspec.Struct, frozen=True):
    """Counters and gauges of the requests of one salt, in blocks.

    Attributes:
        requests: requests that got their device blocks. Forks, and requests that come again after
            they were preempted, are not counted again.
        blocks_looked_up: full blocks of their prompts.
        device_hits: blocks found on the device.
        host_hits: blocks found in host memory.
        storage_hits: blocks found in storage.
        device_blocks: resident device blocks.
        host_blocks: resident blocks of the host tier, None without a quota of the host tier: it
            does not follow blocks by salt then.
        storage_blocks: blocks in the store that are known to be of the salt, None without a quota
            of the store: it does not follow blocks by salt then.
        device_quota: the most resident device blocks, None for no limit.
        host_quota: the same in the host tier.
        storage_quota: the same in the store.
        device_quota_evictions: device blocks evicted because of the quota.
        host_quota_evictions: the same in the host tier.
        storage_quota_evictions: the same in the store, with the blocks that it did not take.
    """

    requests: int
    blocks_looked_up: int
    device_hits: int
    host_hits: int
    storage_hits: int
    device_blocks: int
    host_blocks: int | None
    storage_blocks: int | None
    device_quota: int | None
    host_quota: int | None
    storage_quota: int | None
    device_quota_evictions: int
    host_quota_evictions: int
    storage_quota_evictions: int


class Tenants(msgspec.Struct, frozen=True):
    """Statistics by salt. All entries add up to those of the cache.

    Attributes:
        named: by salt, of the salts with a named quota.
        unnamed: by salt, of the first 1,000 others.
        others: of requests without a salt and with any further salt. Their quotas are the defaults,
            which are of each salt.
    """

    named: dict[str, TenantStatistics]
    unnamed: dict[str, TenantStatistics]
    others: TenantStatistics


SUMMED = (
    "requests",
    "blocks_looked_up",
    "device_hits",
    "host_hits",
    "storage_hits",
    "device_quota_evictions",
    "host_quota_evictions",
    "storage_quota_evictions",
)
"""Fields of which `others` is the rest of the cache's."""


def collect_tenants(system: System) -> Tenants:
    """The statistics by salt as of now."""
    rows = system.quotas.counts.rows
    named, unnamed = dict[str, TenantStatistics](), dict[str, TenantStatistics]()
    for number, row in rows.items():
        found = unnamed if system.quotas.get(row.salt) is None else named
        found[row.salt] = _of_salt(system, number, row)
    return Tenants(named, unnamed, _others(system, [*named.values(), *unnamed.values()]))


def named_tenants(system: System) -> Steps[dict[str, TenantStatistics]]:
    """The statistics of the salts with a named quota, one a step. They may be shown to others: any
    other salt may be a secret of its tenant."""
    found: dict[str, TenantStatistics] = {}
    for number, row in list(system.quotas.counts.rows.items()):
        if system.quotas.get(row.salt) is not None:
            found[row.salt] = _of_salt(system, number, row)
        yield
    return found


def _of_salt(system: System, number: int, row: SaltCount) -> TenantStatistics:
    resident, _, evicted = system.index_actor.core.index.tree.owner(number)
    shares = system.evictor_actor.host.shares
    stored = _stored(system)
    quota = system.quotas.get(row.salt) or system.quotas.default
    return TenantStatistics(
        requests=row.requests,
        blocks_looked_up=row.looked_up,
        device_hits=row.device_hits,
        host_hits=row.host_hits,
        storage_hits=row.storage_hits,
        device_blocks=resident,
        host_blocks=shares.resident(number),
        storage_blocks=None if stored is None else stored.held(number),
        device_quota=quota.device,
        host_quota=quota.host,
        storage_quota=quota.storage,
        device_quota_evictions=row.device_evicted + evicted,
        host_quota_evictions=row.host_evicted + shares.evicted.get(number, 0),
        storage_quota_evictions=0 if stored is None else stored.evicted.get(number, 0),
    )


def _stored(system: System) -> StoreShares | None:
    """The objects of the store by salt, None if it does not follow them."""
    return None if system.store is None else system.store.shares


def _others(system: System, listed: list[TenantStatistics]) -> TenantStatistics:
    """The statistics of the cache less those of the listed salts."""
    found, quota = collect(system), system.quotas.default
    tree = system.index_actor.core.index.tree.statistics()
    on_device = tree["device"] - tree["offloading"]
    whole = {name: getattr(found.prefix, name) for name in SUMMED[:5]}
    whole["device_quota_evictions"] = found.prefix.quota_evictions
    whole["host_quota_evictions"] = found.host.quota_evictions
    stored = _stored(system)
    whole["storage_quota_evictions"] = 0 if stored is None else stored.quota_evictions
    left = {name: whole[name] - sum(getattr(one, name) for one in listed) for name in SUMMED}
    resident = None
    if system.evictor_actor.host.shares.limited:
        resident = found.host.resident - sum(one.host_blocks or 0 for one in listed)
    return TenantStatistics(
        **left,
        device_blocks=on_device - sum(one.device_blocks for one in listed),
        host_blocks=resident,
        storage_blocks=None
        if stored is None
        else stored.counted - sum(one.storage_blocks or 0 for one in listed),
        device_quota=quota.device,
        host_quota=quota.host,
        storage_quota=quota.storage,
    )
