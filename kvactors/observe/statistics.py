"""Statistics of a whole system: the counters of every actor and the contents of the tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import msgspec

from kvactors.actor import ActorStatistics, SupervisorStatistics
from kvactors.actor.sliced import Sliced, finish
from kvactors.cpu_evictor.memory import HostStatistics
from kvactors.data_plane.ranks.leader import RankStatistics
from kvactors.flush_notifier.deliver import SinkStatistics
from kvactors.gpu_swapper.actor import SwapperStatistics
from kvactors.observe.invariants import Residency, residency_steps
from kvactors.prefix_index.reports import IndexStatistics
from kvactors.quotas import SaltCount
from kvactors.storage.backend import StoreStatistics
from kvactors.system import System

if TYPE_CHECKING:
    from kvactors.data_plane.cuda.engine import CudaStatistics

CopyStatistics: TypeAlias = "CudaStatistics | tuple[RankStatistics, ...] | None"
"""Copy engine statistics: of CUDA, of each tensor-parallel rank, or None for host memory."""


class CacheStatistics(NamedTuple):
    """Counters and gauges of a cache.

    Counters go on across restarts of an actor. The other fields describe the present. Hits are in
    blocks.

    Attributes:
        requests, blocks_looked_up, device_hits, host_hits, storage_hits, no_room: as in `prefix`.
        messages: messages sent by actors.
        late_replies: answers whose asker no longer waited.
        prefix: the prefix index.
        host: the host tier.
        store: the store.
        flush: the sinks.
        swapper: copies between device and host.
        copies: the copy engine of a GPU, those of each rank, or None for host memory.
        actors: the actors.
        supervisor: failures and restarts.
        groups: each group of layers beside `[layout]`. A hit of a group is a found item
            (docs/groups.md).
    """

    requests: int
    blocks_looked_up: int
    device_hits: int
    host_hits: int
    storage_hits: int
    no_room: int
    messages: int
    late_replies: int
    prefix: IndexStatistics
    host: HostStatistics
    store: StoreStatistics | None
    flush: tuple[SinkStatistics, ...]
    swapper: SwapperStatistics
    copies: CopyStatistics
    actors: tuple[ActorStatistics, ...]
    supervisor: SupervisorStatistics
    groups: dict[str, CacheStatistics] = {}  # noqa: RUF012

    @property
    def hit_rate(self) -> float:
        """Share of the looked up blocks that some tier had, 0.0 before the first."""
        hits = self.device_hits + self.host_hits + self.storage_hits
        return hits / max(1, self.blocks_looked_up)

    def __repr__(self) -> str:
        return (
            f"<CacheStatistics: {self.requests} requests, hit rate {self.hit_rate:.4f} of "
            f"{self.blocks_looked_up} blocks (device {self.device_hits}, host {self.host_hits}, "
            f"storage {self.storage_hits}), {self.no_room} without room>"
        )

    def as_dict(self) -> dict[str, Any]:
        """Nested dictionaries of names and values, for JSON."""
        found: dict[str, Any] = with_names(self)
        return found


def with_names(value: Any) -> Any:
    """A record with every record inside it as a dictionary, and sequences as lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: with_names(item) for name, item in value._asdict().items()}
    if isinstance(value, (tuple, list)):
        return [with_names(item) for item in value]
    if isinstance(value, dict):
        return {name: with_names(item) for name, item in value.items()}
    return value


def collect(system: System) -> CacheStatistics:
    """The statistics as of now."""
    sums = system.totals.over_incarnations
    index = sums(system.index_actor.index_statistics())
    store = system.store if system.store is not None else system.device_store
    actors = tuple(sums(actor.statistics(), actor.ref.name) for actor in system.supervisor.actors())
    return CacheStatistics(
        index.requests,
        index.blocks_looked_up,
        index.device_hits,
        index.host_hits,
        index.storage_hits,
        index.no_room,
        sum(actor.sent for actor in actors),
        sum(actor.late_replies for actor in actors),
        index,
        sums(system.evictor_actor.host_statistics()),
        None if store is None else store.statistics(),
        system.totals.of_sinks(system.notifier_actor.sinks.statistics(), system.sinks),
        sums(system.swapper_actor.swapper_statistics()),
        system.plane.statistics(),
        actors,
        system.supervisor.statistics(),
        {name: collect(group) for name, group in system.layer_groups.items()},
    )


def residency(system: System) -> Residency:
    """The keys that each tier holds, read from the tier's owner."""
    where: Residency = {}
    finish(residency_steps(system, where))
    return where


# -- by salt


class TenantStatistics(msgspec.Struct, frozen=True):
    """Counters and gauges of the requests of one salt, in blocks.

    Attributes:
        requests: requests that got their device blocks. Forks, and requests that come again after
            they were preempted, are not counted again.
        host_blocks: resident blocks. None without a quota of the host tier or of a named salt: it
            does not follow blocks by salt then.
        storage_blocks: known to be of the salt, None without a store that keeps salts.
        device_quota, host_quota, storage_quota: None for no limit.
        device_quota_evictions, host_quota_evictions, storage_quota_evictions: of salts with a named
            quota and, in each tier, of the first 4,096 others. Those of the store count the blocks
            that it did not take, too.
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

    @property
    def hit_rate(self) -> float:
        """Share of the looked up blocks that some tier had, 0.0 before the first."""
        hits = self.device_hits + self.host_hits + self.storage_hits
        return hits / max(1, self.blocks_looked_up)


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
    *("requests", "blocks_looked_up", "device_hits", "host_hits", "storage_hits"),
    *("device_quota_evictions", "host_quota_evictions", "storage_quota_evictions"),
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


def named_tenants(system: System) -> Sliced[dict[str, TenantStatistics]]:
    """The statistics of the salts with a named quota, one a step. They may be shown to others: any
    other salt may be a secret of its tenant."""
    found: dict[str, TenantStatistics] = {}
    for number, row in list(system.quotas.counts.rows.items()):
        if system.quotas.get(row.salt) is not None:
            found[row.salt] = _of_salt(system, number, row)
        yield
    return found


def _of_salt(system: System, number: int, row: SaltCount) -> TenantStatistics:
    resident, _, evicted = system.index_actor.index.tree.owner(number)
    shares = system.evictor_actor.host.shares
    stored = None if system.store is None else system.store.shares
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


def _others(system: System, listed: list[TenantStatistics]) -> TenantStatistics:
    found, quota = collect(system), system.quotas.default
    tree = system.index_actor.index.tree.statistics()
    on_device = tree["device"] - tree["offloading"]
    whole = {name: getattr(found.prefix, name) for name in SUMMED[:5]}
    whole["device_quota_evictions"] = found.prefix.quota_evictions
    whole["host_quota_evictions"] = found.host.quota_evictions
    stored = None if system.store is None else system.store.shares
    whole["storage_quota_evictions"] = 0 if stored is None else stored.quota_evictions
    left = {name: whole[name] - sum(getattr(one, name) for one in listed) for name in SUMMED}
    in_host = in_storage = None
    if system.evictor_actor.host.shares.limited:
        in_host = found.host.resident - sum(one.host_blocks or 0 for one in listed)
    if stored is not None:
        in_storage = stored.counted - sum(one.storage_blocks or 0 for one in listed)
    return TenantStatistics(
        **left,
        device_blocks=on_device - sum(one.device_blocks for one in listed),
        host_blocks=in_host,
        storage_blocks=in_storage,
        device_quota=quota.device,
        host_quota=quota.host,
        storage_quota=quota.storage,
    )
