"""Statistics of a whole system: the counters of every actor and the contents of the tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from kvactors.actor import ActorStatistics, SupervisorStatistics
from kvactors.cpu_evictor.memory import HostStatistics
from kvactors.data_plane.ranks.state import RankStatistics
from kvactors.flush_notifier.checks import due_of
from kvactors.flush_notifier.deliveries import SinkStatistics
from kvactors.flush_notifier.filter import SinkFilter
from kvactors.gpu_swapper.actor import SwapperStatistics
from kvactors.prefix_index.records import IndexStatistics
from kvactors.sharded import ShardedDict
from kvactors.storage.backends.base import StoreStatistics
from kvactors.system import System
from kvactors.types import ALL_TIERS, Tier, split_hashes

if TYPE_CHECKING:  # a cache without CUDA does not load it
    from kvactors.data_plane.cuda.engine import CudaStatistics

PER_TIER = SinkFilter(int(ALL_TIERS), node=False, at_finish=False)
"""Filter of a sink that receives every event immediately, with each tier separate."""


CopyStatistics: TypeAlias = "CudaStatistics | tuple[RankStatistics, ...] | None"
"""Copy engine statistics: of CUDA, of each tensor-parallel rank, or None for host memory."""


class CacheStatistics(NamedTuple):
    """Counters and gauges of a cache.

    Counters go on across restarts of an actor. The other fields describe the present. Hits are in
    blocks.

    Attributes:
        requests: requests that got their device blocks.
        blocks_looked_up: full blocks of their prompts.
        device_hits: blocks found on the device.
        host_hits: blocks found in host memory.
        storage_hits: blocks found in storage.
        no_room: acquires that were refused with NoRoom.
        messages: messages sent by actors.
        late_replies: answers of actors whose asker no longer waited.
        prefix: the prefix index: requests, leases, device blocks.
        host: the host tier.
        store: the store, None without one.
        flush: one record for each sink.
        swapper: copies between device and host.
        copies: the copy engine: of a GPU, of each rank, or None for host memory.
        actors: one record for each actor.
        supervisor: failures and restarts of actors.
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
    index = sums(system.index_actor.core.statistics())
    actors = tuple(sums(actor.statistics(), actor.ref.name) for actor in system.supervisor.actors())
    return CacheStatistics(
        index.requests,
        index.blocks_looked_up,
        index.device_hits,
        index.host_hits,
        index.storage_hits,
        index.no_room,
        sum(actor.told for actor in actors),
        sum(actor.late_replies for actor in actors),
        index,
        sums(system.evictor_actor.host_statistics()),
        store_of(system),
        system.totals.of_sinks(system.notifier_actor.sinks.statistics(), system.sinks),
        sums(system.swapper_actor.swapper_statistics()),
        system.plane.statistics(),
        actors,
        system.supervisor.statistics(),
    )


def store_of(system: System) -> StoreStatistics | None:
    """The store's statistics, or None without a store."""
    store = system.store if system.store is not None else system.device_store
    return store.statistics() if store is not None else None


def residency(system: System) -> dict[Tier, set[bytes]]:
    """The keys that each tier holds, read from the tier's owner."""
    return {
        Tier.DEVICE: set(split_hashes(system.index_actor.index.tree.device_hashes())),
        Tier.HOST: set(system.evictor_actor.host_hashes()),
        Tier.STORAGE: set(system.store.keys()) if system.store is not None else set(),
    }


def announceable(system: System, sink: SinkFilter = PER_TIER) -> dict[Tier, set[bytes]]:
    """The keys of each tier that a sink with this filter is sent.

    The blocks among them have a known path, by the tree rule of the ledger.
    """
    found: dict[Tier, set[bytes]] = {tier: set() for tier in Tier}
    where = residency(system)
    for block, tiers in due_of(system.notifier_actor.ledger, sink, where, ShardedDict()):
        for tier in Tier:
            if tiers & tier:
                found[tier].add(block.hash)
    return found
