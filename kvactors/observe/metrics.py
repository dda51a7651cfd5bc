"""The metrics of a cache, and the values behind them: statistics, health, and histograms of its
operations.

Names follow vLLM's where vLLM has one, with the prefix `kvactors:` in place of `vllm:`. Counters
are listed without the suffix `_total` that the exposition adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kvactors.actor.sliced import Sliced
from kvactors.cpu_evictor.memory import NOT_FETCHED, NOT_STORED
from kvactors.data_plane.ranks.leader import RankStatistics
from kvactors.histogram import AGES, BYTES, SECONDS, Histogram
from kvactors.observe.health import Health, health
from kvactors.observe.operations import Operation, OperationWatch
from kvactors.observe.statistics import CacheStatistics, TenantStatistics, collect, named_tenants
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.tree import BlockAges
from kvactors.system import System, summarize

if TYPE_CHECKING:
    from kvactors.tier_cache.answers import TierHealth, TierStatistics
    from kvactors.tier_cache.settings import TierConfig

TIERS = ("none", "device", "host", "storage")
ROUTES = ("device_to_host", "host_to_device", "host_to_storage", "storage_to_host")
"""Values of the label `transfer_type`. A store that accesses device memory itself counts as the
transfers between host and storage."""
ROUTE_OF = dict(zip(("host", "device", "write", "read"), ROUTES, strict=True))
"""By the kind of an operation, or by the target of a copy."""


class Histograms:
    """The histograms of a cache, by the values of their label where they have one."""

    def __init__(self, sinks: Iterable[str]) -> None:
        waits = (*TIERS[:2], "pending")
        self.acquire = {tier: Histogram(SECONDS) for tier in waits}
        self.ready = {tier: Histogram(SECONDS) for tier in TIERS}
        self.load = {tier: Histogram(SECONDS) for tier in ("none", "host", "storage")}
        self.offload, self.save = Histogram(SECONDS), Histogram(SECONDS)
        self.request = Histogram((*SECONDS, 60.0, 120.0, 300.0))
        self.transfer_seconds = {route: Histogram(SECONDS) for route in ROUTES}
        self.transfer_bytes = {route: Histogram(BYTES) for route in ROUTES}
        self.flush = {sink: Histogram(SECONDS) for sink in sinks}
        self.lifetime, self.idle, self.gap = Histogram(AGES), Histogram(AGES), Histogram(AGES)
        self.loop_lag = Histogram(SECONDS)


class MetricsWatch:
    """Fills the histograms of one system. hit: requests that found cached blocks."""

    def __init__(self, system: System) -> None:
        self.operations = OperationWatch(self.operation, self.index_started)
        self.histograms = Histograms(system.sinks)
        self.hit = 0
        self.system = system
        self._index: PrefixIndex | None = None

    def index_started(self, index: PrefixIndex) -> None:
        """Follow the ages of the blocks of an incarnation of PrefixIndex."""
        found = self.histograms
        index.index.ages = BlockAges(found.lifetime, found.idle, found.gap)
        self._index = index

    def attach(self) -> None:
        self.operations.attach(self.system)

    def detach(self) -> None:
        """Observe no longer, and keep no more ages of blocks."""
        self.operations.detach(self.system)
        if self._index is not None:
            self._index.index.ages = None

    def operation(self, done: Operation) -> None:
        found, seconds = self.histograms, done.ended - done.began
        match done.kind:
            case "ready" | "load" | "acquire":
                self.hit += done.kind == "ready" and done.tier != "none"
                if done.ok or done.kind != "acquire":
                    getattr(found, done.kind)[done.tier].observe(seconds)
            case "offload" | "save" | "request":
                getattr(found, done.kind).observe(seconds)
            case "copy" | "read" | "write" if done.blocks:
                route = ROUTE_OF.get(done.kind) or ROUTE_OF[done.tier]
                found.transfer_seconds[route].observe(seconds)
                found.transfer_bytes[route].observe(done.blocks * self.system.layout.block_bytes)
            case "flush" if done.ok and done.where in found.flush:
                found.flush[done.where].observe(seconds)


class Snapshot(NamedTuple):
    """Everything that metrics show, as of one moment."""

    statistics: CacheStatistics
    health: Health
    summary: dict[str, Any]
    watch: MetricsWatch
    leaked: int
    ranks: tuple[RankStatistics, ...]
    opened_at: float
    tenants: dict[str, TenantStatistics]


def take_snapshot(system: System, watch: MetricsWatch) -> Sliced[Snapshot]:
    """Read the values in the loop's thread: of the salts in steps, all others in the last one."""
    tenants = yield from named_tenants(system)
    ranks = () if system.ranks is None else system.ranks.statistics()
    found = collect(system), health(system), summarize(system), watch
    return Snapshot(*found, system.leaked_leases, ranks, system.opened_at, tenants)


# -- the table of metrics

PREFIX = "kvactors:"
FASTDEPLOY = "fastdeploy:"

Samples = Iterable[tuple[tuple[str, ...], Any]]
"""The values of the labels, and the value: a number or a Histogram."""

Reader = str | Mapping[str, str] | Callable[[Any], Any]
"""Where the value of a metric is: a function of the snapshot, or the path of an attribute of the
statistics or of the snapshot, or such a path by label. The value of a mapping is by label."""


class Family(NamedTuple):
    """One metric. An `info` has labels that describe the cache, and the value 1."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    labels: tuple[str, ...]
    text: str
    read: Callable[[Any], Samples]


def counter(name: str, text: str, read: Reader, *labels: str) -> Family:
    """A metric that grows."""
    return Family(name, "counter", labels, text, _samples(read))


def gauge(name: str, text: str, read: Reader, *labels: str) -> Family:
    """A metric of now."""
    return Family(name, "gauge", labels, text, _samples(read))


def histogram(name: str, text: str, read: str, *labels: str) -> Family:
    """A histogram of `MetricsWatch`."""
    return Family(name, "histogram", labels, text, _samples(f"watch.histograms.{read}"))


def _samples(read: Reader) -> Callable[[Any], Samples]:
    def samples(snapshot: Any) -> Samples:
        if isinstance(read, str):
            found = _at(snapshot, read)
        elif isinstance(read, Mapping):
            found = {label: _at(snapshot, path) for label, path in read.items()}
        else:
            found = read(snapshot)
        if isinstance(found, Mapping):
            return [((label,), value) for label, value in found.items()]
        return found if isinstance(found, list) else [((), found)]

    return samples


def _at(snapshot: Any, path: str) -> Any:
    """The attribute at a path, 0 of a store that is not there."""
    first, *others = path.split(".")
    found = getattr(snapshot if first in snapshot._fields else snapshot.statistics, first)
    for name in others:
        if found is None:
            return 0
        found = getattr(found, name)
    return found


def _each(records: str, read: str | Callable[[Any], float]) -> Callable[[Snapshot], dict[str, Any]]:
    """By name: a value of each record of the statistics."""
    value = attrgetter(read) if isinstance(read, str) else read
    return lambda s: {one.name: value(one) for one in getattr(s.statistics, records)}


def _by_rank(value: Callable[[RankStatistics], float]) -> Callable[[Snapshot], dict[str, float]]:
    return lambda s: {str(one.rank): value(one) for one in s.ranks}


def _statuses(*names: str) -> Callable[[Any], dict[str, float]]:
    return lambda s: {one: float(s.health.status == one) for one in names}


def _of_salts(*fields: str) -> Callable[[Snapshot], Samples]:
    """Samples by salt. Of several fields, which begin with a tier, they are by salt and tier, and
    None has no sample."""
    return lambda s: [
        ((salt, field.partition("_")[0]) if len(fields) > 1 else (salt,), getattr(found, field))
        for salt, found in s.tenants.items()
        for field in fields
        if getattr(found, field) is not None
    ]


HITS = {tier: f"prefix.{tier}_hits" for tier in TIERS[1:]}
CAPACITIES = {
    "device": "prefix.blocks_total", "host": "host.capacity", "storage": "store.capacity"
}  # fmt: skip

OUTCOMES = (
    *("reads", "writes", "existing", "misses", "corrupt", "no_space", "unavailable", "late"),
    "refused",
)


def _hit_tokens(s: Snapshot) -> dict[str, float]:
    return {tier: _at(s, path) * s.summary["block_size"] for tier, path in HITS.items()}


def _resident(s: Snapshot) -> dict[str, float]:
    index, store = s.statistics.prefix, s.statistics.store
    return {
        "device": index.blocks_used,
        "host": s.statistics.host.resident,
        "storage": 0 if store is None else store.objects,
    }


def _resident_bytes(s: Snapshot) -> dict[str, float]:
    size = s.summary["block_bytes"]
    sizes = {"device": size, "host": size, "storage": _at(s, "store.object_bytes")}
    return {tier: blocks * sizes[tier] for tier, blocks in _resident(s).items()}


def _of_groups(read: Mapping[str, str]) -> Callable[[Any], Samples]:
    """Values of each group of layers by tier."""
    return lambda s: [
        ((name, tier), _at(group, path))
        for name, group in _at(s, "groups").items()
        for tier, path in read.items()
    ]


def _usage(s: Snapshot) -> dict[str, float]:
    """Parts of the capacities of the tiers that have one."""
    capacity = {tier: _at(s, path) for tier, path in CAPACITIES.items()}
    return {tier: used / capacity[tier] for tier, used in _resident(s).items() if capacity[tier]}


def _moved_bytes(s: Snapshot) -> dict[str, float]:
    copies, size = s.statistics.swapper, _at(s, "store.object_bytes")
    written, read = _at(s, "store.writes") * size, _at(s, "store.reads") * size
    moved = copies.bytes_to_host, copies.bytes_to_device, written, read
    return dict(zip(ROUTES, moved, strict=True))


def _moved_seconds(s: Snapshot) -> dict[str, float]:
    copies = s.statistics.swapper
    spent = {name: one.total for name, one in s.watch.histograms.transfer_seconds.items()}
    moved = {"device_to_host": copies.seconds_to_host, "host_to_device": copies.seconds_to_device}
    return spent | moved


def _outcomes(s: Snapshot) -> dict[str, float]:
    store = s.statistics.store
    return {} if store is None else {name: getattr(store, name) for name in OUTCOMES}


def _tasks(s: Snapshot) -> Samples:
    return [
        ((sink.name, residency), getattr(sink, residency))
        for sink in s.statistics.flush
        for residency in ("resident", "gone")
    ]


def _info(s: Snapshot) -> Samples:
    return [(tuple(str(s.summary[label]) for label in INFO), 1.0)]


INFO = ("model", "block_size", "block_bytes", "device_blocks", "host_slots", "store", "ranks")

FAMILIES: tuple[Family, ...] = (
    # hits
    counter("prefix_cache_queries", "Tokens of full blocks looked up.",
            lambda s: s.statistics.prefix.blocks_looked_up * s.summary["block_size"]),
    counter("prefix_cache_hits", "Cached tokens, by tier.",
            _hit_tokens, "tier"),
    counter("kv_block_queries", "Full blocks looked up.", "prefix.blocks_looked_up"),
    counter("kv_block_hits", "Cached blocks, by tier.", HITS, "tier"),
    # requests
    counter("requests", "Requests that got their device blocks.", "prefix.requests"),
    counter("requests_no_room", "Acquires refused with NoRoom.", "prefix.no_room"),
    counter("requests_kept_out",
            "Acquires refused for their size (more blocks than the device has), or for pins.",
            {"size": "prefix.refused_size", "pins": "prefix.refused_pins"}, "reason"),
    counter("num_preemptions", "Preempted requests.", "prefix.preempted"),
    counter("requests_abandoned", "Leases whose holder had gone.", "prefix.abandoned"),
    counter("leases_leaked", "Leases garbage-collected before their end.", "leaked"),
    gauge("num_requests_running", "Leases in use.", "prefix.leases"),
    gauge("num_requests_waiting", "Requests waiting for device blocks.", "prefix.waiting"),
    # occupancy
    gauge("kv_cache_usage_perc", "Used part of a tier, 0 to 1.",
          _usage, "tier"),
    gauge("tier_capacity_blocks", "Capacity of a tier, 0 without a limit in blocks.",
          CAPACITIES, "tier"),
    gauge("tier_blocks", "Blocks in a tier.", _resident, "tier"),
    gauge("tier_bytes", "Bytes of the blocks in a tier.", _resident_bytes, "tier"),
    gauge("group_blocks", "Blocks of a group of layers in a tier.",
          _of_groups({"device": "prefix.blocks_used", "host": "host.resident",
                      "storage": "store.objects"}), "group", "tier"),
    gauge("group_capacity_blocks", "Capacity of a tier for a group.",
          _of_groups(CAPACITIES), "group", "tier"),
    counter("group_hits", "Hits of a group, by tier.",
            _of_groups({tier: f"{tier}_hits" for tier in CAPACITIES}), "group", "tier"),
    counter("group_blocks_evicted", "Blocks of a group that left a tier for others.",
            _of_groups({"device": "prefix.evicted", "host": "host.evicted",
                        "storage": "store.evicted"}), "group", "tier"),
    gauge("device_blocks_free", "Device blocks without a block of a request.",
          "prefix.blocks_free"),
    gauge("device_blocks_evictable", "Cached device blocks in no request.",
          "prefix.evictable"),
    gauge("host_slots_pinned", "Host slots in a transfer.", "host.pinned"),
    gauge("host_small_pages", "Whether host slots are in pages of 4 KiB.",
          lambda s: int(bool(s.statistics.host.small_pages))),
    # movement
    counter("kv_offload_total_bytes", "Bytes moved between tiers.", _moved_bytes, "transfer_type"),
    counter("kv_offload_total_time", "Seconds of transfers, added up.",
            _moved_seconds, "transfer_type"),
    histogram("kv_offload_size", "Bytes of one transfer.", "transfer_bytes", "transfer_type"),
    histogram("kv_offload_seconds", "Seconds of one transfer.", "transfer_seconds",
              "transfer_type"),
    counter("blocks_evicted", "Blocks that left a tier for others.",
            {"device": "prefix.evicted", "host": "host.evicted", "storage": "store.evicted"},
            "tier"),
    counter("quota_evictions",
            "Blocks evicted because their salt was above its quota.",
            {"device": "prefix.quota_evictions", "host": "host.quota_evictions",
             "storage": "store.quota_evictions"}, "tier"),
    gauge("pinned_blocks", "Pinned blocks.",
          {"device": "prefix.pinned", "host": "host.pinned_blocks"}, "tier"),
    counter("pins_refused", "Pins beyond the share of pinned blocks.",
            {"device": "prefix.pins_refused", "host": "host.pins_refused"}, "tier"),
    counter("blocks_rescued", "Blocks matched again while they were offloaded.", "prefix.rescued"),
    counter("blocks_shed", "Blocks not written to storage for lack of host slots.", "host.shed"),
    counter("blocks_not_fetched",
            "Blocks that storage had and a request did not get.",
            {name.removeprefix("not_fetched_"): f"host.{name}" for name in NOT_FETCHED}, "reason"),
    gauge("prefill_tokens_per_s", "Prompt tokens that the engine computes in a second, or 0.",
          "prefix.prefill_tokens_per_s"),
    gauge("storage_read_seconds", "Predicted seconds of a read of 1 or 64 blocks.",
          {"1": "host.read_block_s", "64": "host.read_window_s"}, "blocks"),
    counter("copy_failures", "Blocks whose copy between device and host failed.",
            "host.copy_failures"),
    counter("write_failures", "Blocks that the store did not take.", "host.write_failures"),
    counter("overdue_loads", "Loads that missed their deadline.", "prefix.overdue_loads"),
    counter("forks", "Leases made by `Lease.fork`.", "prefix.forks"),
    counter("tails_copied", "Device blocks copied for forks.", "prefix.tails_copied"),
    gauge("operations_in_flight", "Operations in flight.",
          {"load": "prefix.loads_in_flight", "offload": "prefix.offloads_in_flight",
           "save": "prefix.saves_in_flight", "copy": "swapper.in_flight"}, "operation"),
    # latencies
    histogram("acquire_seconds",
              "Seconds of an acquire. tier: `none` (no hits), `device`, or `pending` (loads).",
              "acquire", "tier"),
    histogram("ready_seconds",
              "Seconds from an acquire to the end of its loads, by the lowest tier used.",
              "ready", "tier"),
    histogram("load_seconds", "Seconds of a load, by the lowest tier used.", "load", "tier"),
    histogram("offload_seconds", "Seconds of an offload to the host tier.", "offload"),
    histogram("save_seconds", "Seconds until a save frees its device blocks.", "save"),
    histogram("request_seconds", "Seconds from an acquire to the end of the lease.", "request"),
    # blocks
    histogram("kv_block_lifetime_seconds",
              "Seconds from taking a device block to its eviction.", "lifetime"),
    histogram("kv_block_idle_before_evict_seconds",
              "Seconds from the last use of a block to its eviction.", "idle"),
    histogram("kv_block_reuse_gap_seconds", "Seconds between two uses of a cached device block.",
              "gap"),
    # store
    counter("store_objects", "Objects by outcome.", _outcomes, "outcome"),
    counter("blocks_not_stored",
            "Blocks due in the store, not written: shed, refused, no_space, unavailable or late.",
            {"shed": "host.shed"}
            | {name.removeprefix("not_stored_"): f"host.{name}" for name in NOT_STORED}, "reason"),
    counter("store_faults", "Calls of the back end that broke its contract.", "store.faults"),
    counter("store_objects_without_checksum",
            "Misses of objects without a payload checksum.", "store.without_checksum"),
    gauge("store_breaker_open", "1 while the store's circuit breaker is not closed.",
          lambda s: float(_at(s, "store.breaker") not in ("closed", 0))),
    # sinks
    gauge("flush_pending", "Blocks on which a sink's view differs from the tiers.",
          _each("flush", "pending"), "sink"),
    gauge("flush_lag_seconds", "Age of the oldest pending change.",
          _each("flush", "oldest_pending_age"), "sink"),
    histogram("flush_seconds",
              "Seconds from the oldest change to its acknowledgement.",
              "flush", "sink"),
    counter("flush_tasks", "Acknowledged tasks.", _tasks, "sink", "residency"),
    counter("flush_blocks", "Blocks in acknowledged tasks.", _each("flush", "blocks"), "sink"),
    counter("flush_retries", "Failed calls.", _each("flush", "retried"), "sink"),
    counter("flush_resyncs", "Resyncs.", _each("flush", "resyncs"), "sink"),
    gauge("sink_up", "1 if the last call of a sink succeeded.",
          _each("flush", lambda sink: float(not sink.failures)), "sink"),
    # actors and ranks
    counter("actor_restarts", "Restarts.", _each("actors", "restarts"), "actor"),
    counter("actor_turns", "Messages handled.", _each("actors", "turns"), "actor"),
    gauge("actor_queued", "Messages in an actor's channel.",
          _each("actors", lambda actor: actor.channel.queued + actor.channel.control), "actor"),
    gauge("actor_up", "1 while an actor runs.",
          _each("actors", lambda actor: float(actor.state == "running")), "actor"),
    gauge("rank_healthy", "1 while a rank is healthy.",
          _by_rank(lambda rank: float(rank.health == "healthy")), "rank"),
    counter("rank_operations", "Operations sent.",
            _by_rank(lambda rank: rank.operations), "rank"),
    counter("rank_losses", "Lost connections.",
            _by_rank(lambda rank: rank.losses), "rank"),
    # the process
    histogram("loop_lag_seconds",
              "Seconds by which a timer of the event loop, due every 50 ms, is late.", "loop_lag"),
    gauge("start_time_seconds", "Unix time of the opening.", "opened_at"),
    # salts
    counter("tenant_requests",
            "Requests of a salt with a named quota. Other salts have no metrics.",
            _of_salts("requests"), "salt"),
    counter("tenant_blocks_looked_up", "Full blocks of their prompts.",
            _of_salts("blocks_looked_up"), "salt"),
    counter("tenant_block_hits", "Cached blocks of their prompts.",
            _of_salts("device_hits", "host_hits", "storage_hits"), "salt", "tier"),
    gauge("tenant_blocks", "Resident blocks.",
          _of_salts("device_blocks", "host_blocks", "storage_blocks"), "salt", "tier"),
    gauge("tenant_quota_blocks", "The quota, absent for no limit.",
          _of_salts("device_quota", "host_quota", "storage_quota"), "salt", "tier"),
    counter("tenant_quota_evictions", "Blocks evicted because of the quota.",
            _of_salts("device_quota_evictions", "host_quota_evictions", "storage_quota_evictions"),
            "salt", "tier"),
    # health
    gauge("health", "1 for the present status.", _statuses("ok", "degraded", "failed"), "status"),
    gauge("degraded", "1 for each part that does not work.",
          lambda s: {reason.component: 1.0 for reason in s.health.reasons}, "component"),
    Family("cache_config_info", "info", INFO, "Sizes and parts of the cache.", _info),
)  # fmt: skip


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _hit_share(*tiers: str) -> Callable[[Snapshot], float]:
    return lambda s: _share(
        sum(_at(s, HITS[tier]) for tier in tiers), s.statistics.prefix.blocks_looked_up
    )


FASTDEPLOY_FAMILIES: tuple[Family, ...] = (
    gauge("hit_req_rate", "Requests with cached blocks, of all requests.",
          lambda s: _share(s.watch.hit, s.statistics.prefix.requests)),
    gauge("hit_token_rate", "Cached tokens, of all.", _hit_share(*HITS)),
    gauge("gpu_hit_token_rate", "Tokens cached on the device, of all.", _hit_share("device")),
    gauge("cpu_hit_token_rate", "Tokens cached in host memory, of all.", _hit_share("host")),
    counter("prefix_cache_token_num", "Cached tokens.", lambda s: sum(_hit_tokens(s).values())),
    counter("prefix_gpu_cache_token_num", "Tokens cached on the device.",
            lambda s: _hit_tokens(s)["device"]),
    counter("prefix_cpu_cache_token_num", "Tokens cached in host memory.",
            lambda s: _hit_tokens(s)["host"]),
    counter("prefix_ssd_cache_token_num", "Tokens cached in storage.",
            lambda s: _hit_tokens(s)["storage"]),
    gauge("available_gpu_block_num", "Device blocks that are free or evictable.",
          lambda s: s.statistics.prefix.blocks_free + s.statistics.prefix.evictable),
    gauge("free_gpu_block_num", "Free device blocks.", "prefix.blocks_free"),
    gauge("max_gpu_block_num", "Device blocks.", "prefix.blocks_total"),
    gauge("max_cpu_block_num", "Host slots.", lambda s: s.summary["host_slots"]),
    gauge("available_gpu_resource", "Free device blocks, of all.",
          lambda s: _share(s.statistics.prefix.blocks_free, s.summary["device_blocks"])),
    gauge("gpu_cache_usage_perc", "Device blocks in use, of all.", lambda s: _usage(s)["device"]),
)  # fmt: skip
"""The metrics that FastDeploy's router and dashboards read, under FastDeploy's names."""


# -- of a `TierCache`: under the names of a cache's metrics where the meaning is the same


class TierSnapshot(NamedTuple):
    """Everything that the metrics of a `TierCache` show, as of one moment."""

    config: TierConfig
    statistics: TierStatistics
    health: TierHealth
    groups: Mapping[str, TierStatistics] = {}


def _tier_blocks(s: TierSnapshot) -> dict[str, float]:
    return {"host": s.statistics.resident, "storage": s.statistics.stored_objects}


def _tier_moved(s: TierSnapshot) -> dict[str, float]:
    found, size = s.statistics, s.config.block_bytes
    return {
        "device_to_host": found.stored * size,
        "host_to_device": (found.host_hits + found.storage_hits) * size,
        "host_to_storage": found.saved_bytes,
        "storage_to_host": found.fetched_bytes,
    }


def _tier_info(s: TierSnapshot) -> Samples:
    config = s.config
    values = (config.model, str(config.block_bytes), str(config.num_slots), config.storage.backend)
    return [(values, 1.0)]


TIER_FAMILIES: tuple[Family, ...] = (
    counter("kv_block_hits", "Cached blocks, by tier.",
            {"host": "host_hits", "storage": "storage_hits"}, "tier"),
    gauge("kv_cache_usage_perc", "Used part of a tier, 0 to 1.",
          lambda s: {"host": s.statistics.resident / s.statistics.slots}, "tier"),
    gauge("tier_capacity_blocks", "Capacity of a tier, 0 without a limit in blocks.",
          lambda s: {"host": s.statistics.slots, "storage": s.config.storage.capacity_blocks or 0},
          "tier"),
    gauge("tier_blocks", "Blocks in a tier.", _tier_blocks, "tier"),
    gauge("group_blocks", "Blocks of a group of layers in a tier.",
          _of_groups({"host": "resident", "storage": "stored_objects"}), "group", "tier"),
    gauge("group_capacity_blocks", "Capacity of a tier for a group.",
          _of_groups({"host": "slots"}), "group", "tier"),
    counter("group_hits", "Hits of a group, by tier.",
            _of_groups({"host": "host_hits", "storage": "storage_hits"}), "group", "tier"),
    counter("group_blocks_evicted", "Blocks of a group that left a tier for others.",
            _of_groups({"host": "evicted"}), "group", "tier"),
    gauge("tier_bytes", "Bytes of the blocks in a tier.",
          lambda s: {tier: n * s.config.block_bytes for tier, n in _tier_blocks(s).items()},
          "tier"),
    gauge("host_slots_pinned", "Host slots in a transfer.", "pinned"),
    counter("kv_offload_total_bytes", "Bytes moved between tiers.", _tier_moved, "transfer_type"),
    counter("blocks_evicted", "Blocks that left a tier for others.", {"host": "evicted"}, "tier"),
    counter("copy_failures", "Blocks whose copy between device and host failed.", "failed_stores"),
    counter("write_failures", "Blocks that the store did not take.", "failed_saves"),
    gauge("health", "1 for the present status.", _statuses("ok", "degraded", "closed"), "status"),
    Family("cache_config_info", "info", ("model", "block_bytes", "host_slots", "store"),
           "Sizes and parts of the cache.", _tier_info),
)  # fmt: skip

OFFLOAD_FAMILIES: tuple[Family, ...] = (
    counter("kv_offload_tiering_chunk_hits", "Cached blocks, by tier.",
            {"host": "host_hits", "storage": "storage_hits"}, "tier"),
    counter("kv_offload_tiering_read_bytes", "Bytes read from a tier into host slots.",
            {"storage": "fetched_bytes"}, "tier"),
    counter("kv_offload_tiering_write_bytes", "Bytes written from host slots to a tier.",
            {"storage": "saved_bytes"}, "tier"),
    counter("kv_offload_tiering_promotion_job_failures", "Blocks that a tier did not return.",
            {"storage": "failed_fetches"}, "tier"),
    counter("kv_offload_tiering_cascade_job_failures", "Blocks that a tier did not take.",
            {"storage": "failed_saves"}, "tier"),
    counter("kv_offload_tiering_promotion_allocation_failures",
            "Stored blocks that were misses: no host slot was free for too long.",
            "refused_fetches"),
    counter("kv_offload_stored_chunks", "Blocks copied from the device to host slots.", "stored"),
    counter("kv_offload_stores_failed", "Copies from the device that failed.", "failed_stores"),
    counter("kv_offload_refused_stores",
            "Device blocks not stored: no host slot was free for too long.",
            "refused_stores"),
    counter("kv_offload_evicted_chunks", "Blocks that left the host tier for others.",
            {"host": "evicted"}, "tier"),
    counter("kv_offload_unsaved_chunks", "Evicted blocks that should have been saved.",
            "unsaved"),
    gauge("kv_offload_cpu_cache_usage_perc", "Part of the slots in use.",
          lambda s: s.statistics.pinned / s.statistics.slots),
    gauge("kv_offload_cpu_cache_fill_perc", "Part of the slots with blocks.",
          lambda s: s.statistics.resident / s.statistics.slots),
    gauge("kv_offload_stored_objects", "Objects in storage.", "stored_objects"),
    gauge("kv_offload_healthy", "1 while every tier and sink works.",
          lambda s: s.health.status == "ok"),
)  # fmt: skip
"""Further ones, under the names of vLLM's tiers, where they begin with `vllm:`."""
