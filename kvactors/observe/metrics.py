"""The metrics of a cache, and the values behind them: statistics, health, and histograms of its
operations.

Names follow vLLM's where vLLM has one, with the prefix `kvactors:` in place of `vllm:`. Counters
are listed without the suffix `_total` that the exposition adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from kvactors.actor.sliced import Sliced
from kvactors.cpu_evictor.memory import NOT_FETCHED, NOT_STORED
from kvactors.histogram import AGES, BYTES, SECONDS, Histogram
from kvactors.observe.health import Health, health
from kvactors.observe.operations import Operation, OperationWatch
from kvactors.observe.statistics import CacheStatistics, TenantStatistics, collect, named_tenants
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.ages import BlockAges
from kvactors.summary import Summary, summarize
from kvactors.system import System

TIERS = ("none", "device", "host", "storage")
ROUTES = ("device_to_host", "host_to_device", "host_to_storage", "storage_to_host")
"""Values of the label `transfer_type`. A store that accesses device memory itself counts as the
transfers between host and storage."""


class Histograms:
    """The histograms of a cache, by the values of their label where they have one."""

    def __init__(self) -> None:
        waits = (*TIERS[:2], "pending")
        self.acquire = {tier: Histogram(SECONDS) for tier in waits}
        self.ready = {tier: Histogram(SECONDS) for tier in TIERS}
        self.load = {tier: Histogram(SECONDS) for tier in ("none", "host", "storage")}
        self.offload, self.save = Histogram(SECONDS), Histogram(SECONDS)
        self.request = Histogram((*SECONDS, 60.0, 120.0, 300.0))
        self.transfer_seconds = {route: Histogram(SECONDS) for route in ROUTES}
        self.transfer_bytes = {route: Histogram(BYTES) for route in ROUTES}
        self.flush: dict[str, Histogram] = {}
        self.lifetime, self.idle, self.gap = Histogram(AGES), Histogram(AGES), Histogram(AGES)
        self.loop_lag = Histogram(SECONDS)


class MetricsWatch:
    """Fills the histograms of one system.

    Args:
        block_bytes: of the cache's layout.
        sinks: names of the sinks.

    Attributes:
        operations: finds the operations.
        refused: acquires that ended without a lease.
        hit: requests whose blocks are ready, and some of them were cached.
    """

    def __init__(self, block_bytes: int, sinks: tuple[str, ...]) -> None:
        self.operations = OperationWatch(self.operation, self.index_started)
        self.histograms = histograms = Histograms()
        histograms.flush = {sink: Histogram(SECONDS) for sink in sinks}
        self.refused = self.hit = 0
        self._block_bytes = block_bytes
        self._index: PrefixIndex | None = None

    def index_started(self, index: PrefixIndex) -> None:
        """Follow the ages of the blocks of an incarnation of PrefixIndex."""
        found = self.histograms
        index.core.index.pool.ages = BlockAges(found.lifetime, found.idle, found.gap)
        self._index = index

    def attach(self, system: System) -> None:
        """Observe a system from now on."""
        self.operations.attach(system)

    def detach(self, system: System) -> None:
        """Observe it no longer, and keep no more ages of blocks."""
        self.operations.detach(system)
        if self._index is not None:
            self._index.core.index.pool.ages = None

    def operation(self, done: Operation) -> None:
        """Count an operation that has ended."""
        found, seconds = self.histograms, done.ended - done.began
        match done.kind:
            case "acquire":
                if not done.ok:
                    self.refused += 1
                    return
                found.acquire[done.tier].observe(seconds)
            case "ready":
                self.hit += done.tier != "none"
                found.ready[done.tier].observe(seconds)
            case "load":
                found.load[done.tier].observe(seconds)
            case "offload":
                found.offload.observe(seconds)
            case "save":
                found.save.observe(seconds)
            case "request":
                found.request.observe(seconds)
            case "copy":
                route = "device_to_host" if done.tier == "host" else "host_to_device"
                self._moved(route, done.blocks, seconds)
            case "read":
                self._moved("storage_to_host", done.blocks, seconds)
            case "write":
                self._moved("host_to_storage", done.blocks, seconds)
            case "flush" if done.ok and done.where in found.flush:
                found.flush[done.where].observe(seconds)

    def _moved(self, route: str, blocks: int, seconds: float) -> None:
        if blocks:
            self.histograms.transfer_seconds[route].observe(seconds)
            self.histograms.transfer_bytes[route].observe(blocks * self._block_bytes)


class Snapshot(NamedTuple):
    """Everything that metrics show, as of one moment.

    Attributes:
        leaked: leases that were garbage-collected before their end.
        opened_at: Unix time at which the cache was opened.
        tenants: statistics of the salts with a named quota.
    """

    statistics: CacheStatistics
    health: Health
    summary: Summary
    watch: MetricsWatch
    leaked: int
    ranks: tuple[tuple[int, str, int, int, int], ...]
    opened_at: float
    tenants: dict[str, TenantStatistics]


def take_snapshot(system: System, watch: MetricsWatch, leaked: int) -> Sliced[Snapshot]:
    """Read the values, in the loop's thread: those of the salts in steps, all others at the end in
    one."""
    tenants = yield from named_tenants(system)
    ranks = () if system.ranks is None else system.ranks.statistics()
    return Snapshot(
        collect(system),
        health(system),
        summarize(system),
        watch,
        leaked,
        tuple((one.rank, one.health, one.operations, one.losses, one.silences) for one in ranks),
        system.opened_at,
        tenants,
    )


def watch_of(system: System) -> MetricsWatch:
    """A watch for a system, not attached."""
    return MetricsWatch(system.layout.block_bytes, tuple(system.sinks))


# -- name, kind, labels, explanation, and where the values come from


PREFIX = "kvactors:"
FASTDEPLOY = "fastdeploy:"

Value = float | Histogram
Samples = Iterable[tuple[tuple[str, ...], Value]]


class Family(NamedTuple):
    """One metric.

    Attributes:
        kind: `counter` (grows while the cache is open), `gauge` (a value of now), `histogram`, or
            `info` (labels that describe the cache, with the value 1).
        labels: names of the labels.
        text: the explanation.
        read: the samples: the values of the labels, and the value.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram", "info"]
    labels: tuple[str, ...]
    text: str
    read: Callable[[Any], Samples]


def one(read: Callable[[Any], Value]) -> Callable[[Any], Samples]:
    """Samples of a metric without labels."""
    return lambda snapshot: [((), read(snapshot))]


def by(read: Callable[[Any], Mapping[str, Value]]) -> Callable[[Any], Samples]:
    """Samples of a metric with one label."""
    return lambda snapshot: [((label,), value) for label, value in read(snapshot).items()]


def each(
    items: Callable[[Snapshot], Iterable[Any]], value: Callable[[Any], float]
) -> Callable[[Snapshot], Samples]:
    """Samples of a metric with one label, of records that have a name."""
    return lambda snapshot: [((item.name,), value(item)) for item in items(snapshot)]


def of_salts(value: Callable[[TenantStatistics], float]) -> Callable[[Snapshot], Samples]:
    """Samples of a metric by salt."""
    return lambda s: [((salt,), value(found)) for salt, found in s.tenants.items()]


def of_salts_by_tier(*fields: str) -> Callable[[Snapshot], Samples]:
    """Samples of a metric by salt and tier, of fields that begin with the tier. None has no
    sample."""
    return lambda s: [
        ((salt, field.partition("_")[0]), getattr(found, field))
        for salt, found in s.tenants.items()
        for field in fields
        if getattr(found, field) is not None
    ]


def _not_fetched(s: Snapshot) -> dict[str, float]:
    host = s.statistics.host
    return {name.removeprefix("not_fetched_"): getattr(host, name) for name in NOT_FETCHED}


def _quota_evictions(s: Snapshot) -> dict[str, float]:
    found, store = s.statistics, s.statistics.store
    return {
        "device": found.prefix.quota_evictions,
        "host": found.host.quota_evictions,
        "storage": 0 if store is None else store.quota_evictions,
    }


def _hits(s: Snapshot) -> dict[str, float]:
    index = s.statistics.prefix
    return {"device": index.device_hits, "host": index.host_hits, "storage": index.storage_hits}


def _hit_tokens(s: Snapshot) -> dict[str, float]:
    size = s.summary.block_size
    return {tier: blocks * size for tier, blocks in _hits(s).items()}


def _evicted(s: Snapshot) -> dict[str, float]:
    store = s.statistics.store
    return {
        "device": s.statistics.prefix.evicted,
        "host": s.statistics.host.evicted,
        "storage": 0 if store is None else store.evicted,
    }


def _capacity(s: Snapshot) -> dict[str, float]:
    store = s.statistics.store
    return {
        "device": s.summary.device_blocks,
        "host": s.statistics.host.capacity,
        "storage": 0 if store is None else store.capacity,
    }


def _resident(s: Snapshot) -> dict[str, float]:
    index, store = s.statistics.prefix, s.statistics.store
    return {
        "device": index.blocks_total - index.blocks_free,
        "host": s.statistics.host.resident,
        "storage": 0 if store is None else store.objects,
    }


def _resident_bytes(s: Snapshot) -> dict[str, float]:
    store, size = s.statistics.store, s.summary.block_bytes
    index = s.statistics.prefix
    return {
        "device": (index.blocks_total - index.blocks_free) * size,
        "host": s.statistics.host.resident * size,
        "storage": 0 if store is None else store.objects * store.object_bytes,
    }


def _usage(s: Snapshot) -> dict[str, float]:
    """Parts of the capacities of the tiers that have one."""
    used, capacity = _resident(s), _capacity(s)
    return {tier: used[tier] / capacity[tier] for tier in used if capacity[tier]}


def _bytes(s: Snapshot) -> dict[str, float]:
    copies, store = s.statistics.swapper, s.statistics.store
    size = 0 if store is None else store.object_bytes
    moved = (
        copies.bytes_to_host,
        copies.bytes_to_device,
        0 if store is None else store.writes * size,
        0 if store is None else store.reads * size,
    )
    return dict(zip(ROUTES, moved, strict=True))


def _seconds(s: Snapshot) -> dict[str, float]:
    copies, spent = s.statistics.swapper, s.watch.histograms.transfer_seconds
    moved = (
        copies.seconds_to_host,
        copies.seconds_to_device,
        spent["host_to_storage"].total,
        spent["storage_to_host"].total,
    )
    return dict(zip(ROUTES, moved, strict=True))


def _outcomes(s: Snapshot) -> dict[str, float]:
    store = s.statistics.store
    if store is None:
        return {}
    names = ("reads", "writes", "existing", "misses", "corrupt", "no_space", "unavailable", "late")
    return {name: getattr(store, name) for name in (*names, "refused")}


def _not_stored(s: Snapshot) -> dict[str, float]:
    host = s.statistics.host
    found = {name.removeprefix("not_stored_"): getattr(host, name) for name in NOT_STORED}
    return {"shed": host.shed, **found}


def _tasks(s: Snapshot) -> Iterator[tuple[tuple[str, ...], Value]]:
    for sink in s.statistics.flush:
        yield (sink.name, "resident"), sink.resident
        yield (sink.name, "gone"), sink.gone


def _status(s: Snapshot) -> dict[str, float]:
    return {status: float(s.health.status == status) for status in ("ok", "degraded", "failed")}


def _reasons(s: Snapshot) -> dict[str, float]:
    return {reason.component: 1.0 for reason in s.health.reasons}


def _in_flight(s: Snapshot) -> dict[str, float]:
    index = s.statistics.prefix
    return {
        "load": index.loads_in_flight,
        "offload": index.offloads_in_flight,
        "save": index.saves_in_flight,
        "copy": s.statistics.swapper.in_flight,
    }


def _breaker(s: Snapshot) -> float:
    store = s.statistics.store
    return float(store is not None and store.breaker != "closed")


def _info(s: Snapshot) -> Samples:
    summary = s.summary
    values = (
        summary.model,
        str(summary.block_size),
        str(summary.block_bytes),
        str(summary.device_blocks),
        str(summary.host_slots),
        summary.store,
        str(summary.ranks),
    )
    return [(values, 1.0)]


def _actors(s: Snapshot) -> Iterable[Any]:
    return s.statistics.actors


def _sinks(s: Snapshot) -> Iterable[Any]:
    return s.statistics.flush


INFO = ("model", "block_size", "block_bytes", "device_blocks", "host_slots", "store", "ranks")

FAMILIES: tuple[Family, ...] = (
    # hits
    Family("prefix_cache_queries", "counter", (), "Tokens of full blocks that requests looked up.",
           one(lambda s: s.statistics.prefix.blocks_looked_up * s.summary.block_size)),
    Family("prefix_cache_hits", "counter", ("tier",),
           "Tokens that were cached, by the tier that had them.", by(_hit_tokens)),
    Family("kv_block_queries", "counter", (), "Full blocks that requests looked up.",
           one(lambda s: s.statistics.prefix.blocks_looked_up)),
    Family("kv_block_hits", "counter", ("tier",),
           "Blocks that were cached, by the tier that had them.", by(_hits)),
    # requests
    Family("requests", "counter", (), "Requests that got their device blocks.",
           one(lambda s: s.statistics.prefix.requests)),
    Family("requests_no_room", "counter", (), "Acquires that were refused with NoRoom.",
           one(lambda s: s.statistics.prefix.no_room)),
    Family("requests_kept_out", "counter", ("reason",),
           "Refused acquires that could not be granted at any time: they need more blocks than the "
           "device has, or pinned blocks kept them out.",
           by(lambda s: {"size": s.statistics.prefix.refused_size,
                         "pins": s.statistics.prefix.refused_pins})),
    Family("num_preemptions", "counter", (), "Requests that were preempted.",
           one(lambda s: s.statistics.prefix.preempted)),
    Family("requests_abandoned", "counter", (), "Leases whose holder had gone.",
           one(lambda s: s.statistics.prefix.abandoned)),
    Family("leases_leaked", "counter", (), "Leases that were garbage-collected before their end.",
           one(lambda s: s.leaked)),
    Family("num_requests_running", "gauge", (), "Leases in use.",
           one(lambda s: s.statistics.prefix.leases)),
    Family("num_requests_waiting", "gauge", (), "Requests that wait for device blocks.",
           one(lambda s: s.statistics.prefix.waiting)),
    # occupancy
    Family("kv_cache_usage_perc", "gauge", ("tier",),
           "Part of the capacity of a tier that is in use, 0 to 1.", by(_usage)),
    Family("tier_capacity_blocks", "gauge", ("tier",),
           "Blocks that a tier holds at most, 0 without a limit.", by(_capacity)),
    Family("tier_blocks", "gauge", ("tier",), "Blocks in a tier.", by(_resident)),
    Family("tier_bytes", "gauge", ("tier",), "Bytes of the blocks in a tier, on one rank.",
           by(_resident_bytes)),
    Family("device_blocks_free", "gauge", (), "Device blocks that no block of a request is in.",
           one(lambda s: s.statistics.prefix.blocks_free)),
    Family("device_blocks_evictable", "gauge", (), "Cached device blocks that no request uses.",
           one(lambda s: s.statistics.prefix.evictable)),
    Family("host_slots_pinned", "gauge", (), "Host slots that a transfer uses.",
           one(lambda s: s.statistics.host.pinned)),
    Family("host_small_pages", "gauge", (), "Whether host slots are in pages of 4 KiB.",
           one(lambda s: int(bool(s.statistics.host.small_pages)))),
    # movement
    Family("kv_offload_total_bytes", "counter", ("transfer_type",), "Bytes moved between tiers.",
           by(_bytes)),
    Family("kv_offload_total_time", "counter", ("transfer_type",),
           "Seconds of transfers between tiers, added up.", by(_seconds)),
    Family("kv_offload_size", "histogram", ("transfer_type",), "Bytes of one transfer.",
           by(lambda s: dict(s.watch.histograms.transfer_bytes))),
    Family("kv_offload_seconds", "histogram", ("transfer_type",), "Seconds of one transfer.",
           by(lambda s: dict(s.watch.histograms.transfer_seconds))),
    Family("blocks_evicted", "counter", ("tier",), "Blocks that left a tier for others.",
           by(_evicted)),
    Family("quota_evictions", "counter", ("tier",),
           "Evicted blocks that were chosen because their salt was above its quota.",
           by(_quota_evictions)),
    Family("pinned_blocks", "gauge", ("tier",), "Blocks that requests have pinned.",
           by(lambda s: {"device": s.statistics.prefix.pinned,
                         "host": s.statistics.host.pinned_blocks})),
    Family("pins_refused", "counter", ("tier",), "Pins beyond the share of pinned blocks.",
           by(lambda s: {"device": s.statistics.prefix.pins_refused,
                         "host": s.statistics.host.pins_refused})),
    Family("blocks_rescued", "counter", (), "Blocks matched again while they were offloaded.",
           one(lambda s: s.statistics.prefix.rescued)),
    Family("blocks_shed", "counter", (), "Blocks not written to storage for lack of host slots.",
           one(lambda s: s.statistics.host.shed)),
    Family("blocks_not_fetched", "counter", ("reason",),
           "Blocks that storage had when a request asked for them, and that it did not get.",
           by(_not_fetched)),
    Family("copy_failures", "counter", (), "Blocks whose copy between device and host failed.",
           one(lambda s: s.statistics.host.copy_failures)),
    Family("write_failures", "counter", (), "Blocks that the store did not take.",
           one(lambda s: s.statistics.host.write_failures)),
    Family("overdue_loads", "counter", (), "Loads that missed their deadline.",
           one(lambda s: s.statistics.prefix.overdue_loads)),
    Family("forks", "counter", (), "Leases made by `Lease.fork`.",
           one(lambda s: s.statistics.prefix.forks)),
    Family("tails_copied", "counter", (), "Device blocks copied for forks.",
           one(lambda s: s.statistics.prefix.tails_copied)),
    Family("operations_in_flight", "gauge", ("operation",), "Operations in flight.",
           by(_in_flight)),
    # latencies
    Family("acquire_seconds", "histogram", ("tier",),
           "Seconds of an acquire. tier: `none` without cached blocks, `device`, or `pending` if "
           "blocks are loaded from below.", by(lambda s: dict(s.watch.histograms.acquire))),
    Family("ready_seconds", "histogram", ("tier",),
           "Seconds from an acquire until every load has ended, by the lowest tier used.",
           by(lambda s: dict(s.watch.histograms.ready))),
    Family("load_seconds", "histogram", ("tier",), "Seconds of a load, by the lowest tier used.",
           by(lambda s: dict(s.watch.histograms.load))),
    Family("offload_seconds", "histogram", (), "Seconds of an offload to the host tier.",
           one(lambda s: s.watch.histograms.offload)),
    Family("save_seconds", "histogram", (), "Seconds until the device blocks of a save are free.",
           one(lambda s: s.watch.histograms.save)),
    Family("request_seconds", "histogram", (), "Seconds from an acquire to the end of the lease.",
           one(lambda s: s.watch.histograms.request)),
    # blocks
    Family("kv_block_lifetime_seconds", "histogram", (),
           "Seconds from the request that took a device block to its eviction.",
           one(lambda s: s.watch.histograms.lifetime)),
    Family("kv_block_idle_before_evict_seconds", "histogram", (),
           "Seconds from the last use of a device block to its eviction.",
           one(lambda s: s.watch.histograms.idle)),
    Family("kv_block_reuse_gap_seconds", "histogram", (),
           "Seconds between two uses of a cached device block.",
           one(lambda s: s.watch.histograms.gap)),
    # store
    Family("store_objects", "counter", ("outcome",), "Objects of the store's batches by outcome.",
           by(_outcomes)),
    Family("blocks_not_stored", "counter", ("reason",),
           "Blocks that were due in the store and not written: shed for lack of host slots, "
           "refused by a quota or the capacity, no_space, unavailable, or late.", by(_not_stored)),
    Family("store_faults", "counter", (), "Calls of the back end that broke its contract.",
           one(lambda s: 0 if s.statistics.store is None else s.statistics.store.faults)),
    Family("store_objects_without_checksum", "counter", (),
           "Misses of objects without a checksum, in a pool whose nodes differ in "
           "`storage.mooncake.payload_checksums`.",
           one(lambda s: 0 if s.statistics.store is None
               else s.statistics.store.without_checksum)),
    Family("store_breaker_open", "gauge", (), "1 while the store's circuit breaker is not closed.",
           one(_breaker)),
    # sinks
    Family("flush_pending", "gauge", ("sink",),
           "Blocks on which a sink's view differs from the tiers.",
           each(_sinks, lambda sink: sink.pending)),
    Family("flush_lag_seconds", "gauge", ("sink",), "Age of the oldest pending change.",
           each(_sinks, lambda sink: sink.oldest_pending_age)),
    Family("flush_seconds", "histogram", ("sink",),
           "Seconds from the oldest change of a delivery to its acknowledgement.",
           by(lambda s: dict(s.watch.histograms.flush))),
    Family("flush_tasks", "counter", ("sink", "residency"), "Tasks that a sink acknowledged.",
           _tasks),
    Family("flush_blocks", "counter", ("sink",), "Blocks in those tasks.",
           each(_sinks, lambda sink: sink.blocks)),
    Family("flush_retries", "counter", ("sink",), "Calls of a sink that failed.",
           each(_sinks, lambda sink: sink.retried)),
    Family("flush_resyncs", "counter", ("sink",), "Resyncs of a sink.",
           each(_sinks, lambda sink: sink.resyncs)),
    Family("sink_up", "gauge", ("sink",), "1 if the last call of a sink succeeded.",
           each(_sinks, lambda sink: float(not sink.failures))),
    # actors and ranks
    Family("actor_restarts", "counter", ("actor",), "Restarts of an actor.",
           each(_actors, lambda actor: actor.life)),
    Family("actor_turns", "counter", ("actor",), "Messages that an actor handled.",
           each(_actors, lambda actor: actor.turns)),
    Family("actor_queued", "gauge", ("actor",), "Messages in an actor's channel.",
           each(_actors, lambda actor: actor.channel.queued + actor.channel.control)),
    Family("actor_up", "gauge", ("actor",), "1 while an actor runs.",
           each(_actors, lambda actor: float(actor.state == "running"))),
    Family("rank_healthy", "gauge", ("rank",), "1 while a rank is healthy.",
           lambda s: [((str(rank[0]),), float(rank[1] == "healthy")) for rank in s.ranks]),
    Family("rank_operations", "counter", ("rank",), "Operations sent to a rank.",
           lambda s: [((str(rank[0]),), rank[2]) for rank in s.ranks]),
    Family("rank_losses", "counter", ("rank",), "Times that a rank's connection was lost.",
           lambda s: [((str(rank[0]),), rank[3]) for rank in s.ranks]),
    # the process
    Family("loop_lag_seconds", "histogram", (),
           "Seconds by which a timer of the cache's event loop is late, of one that is due every "
           "50 ms.", one(lambda s: s.watch.histograms.loop_lag)),
    Family("start_time_seconds", "gauge", (), "Unix time at which the cache was opened.",
           one(lambda s: s.opened_at)),
    # salts
    Family("tenant_requests", "counter", ("salt",),
           "Requests of a salt with a named quota. Other salts have no metrics.",
           of_salts(lambda one: one.requests)),
    Family("tenant_blocks_looked_up", "counter", ("salt",), "Full blocks of their prompts.",
           of_salts(lambda one: one.blocks_looked_up)),
    Family("tenant_block_hits", "counter", ("salt", "tier"), "Blocks of these that were cached.",
           of_salts_by_tier("device_hits", "host_hits", "storage_hits")),
    Family("tenant_blocks", "gauge", ("salt", "tier"), "Resident blocks of the salt.",
           of_salts_by_tier("device_blocks", "host_blocks", "storage_blocks")),
    Family("tenant_quota_blocks", "gauge", ("salt", "tier"),
           "The quota of the salt, absent for no limit.",
           of_salts_by_tier("device_quota", "host_quota", "storage_quota")),
    Family("tenant_quota_evictions", "counter", ("salt", "tier"),
           "Blocks of the salt that were evicted because of its quota.",
           of_salts_by_tier("device_quota_evictions", "host_quota_evictions",
                            "storage_quota_evictions")),
    # health
    Family("health", "gauge", ("status",), "1 for the present status.", by(_status)),
    Family("degraded", "gauge", ("component",), "1 for each part that does not work.",
           by(_reasons)),
    Family("cache_config_info", "info", INFO, "Sizes and parts of the cache.", _info),
)  # fmt: skip


def _rate(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _hit_share(tiers: tuple[str, ...]) -> Callable[[Snapshot], Samples]:
    def share(s: Snapshot) -> float:
        hits = _hits(s)
        found = sum(hits[tier] for tier in tiers)
        return _rate(found, s.statistics.prefix.blocks_looked_up)

    return one(share)


def _cached_tokens(tiers: tuple[str, ...]) -> Callable[[Snapshot], Samples]:
    return one(lambda s: sum(_hit_tokens(s)[tier] for tier in tiers))


ALL = ("device", "host", "storage")

FASTDEPLOY_FAMILIES: tuple[Family, ...] = (
    Family("hit_req_rate", "gauge", (), "Requests with cached blocks, of all requests.",
           one(lambda s: _rate(s.watch.hit, s.statistics.prefix.requests))),
    Family("hit_token_rate", "gauge", (), "Cached tokens, of all.", _hit_share(ALL)),
    Family("gpu_hit_token_rate", "gauge", (), "Tokens cached on the device, of all.",
           _hit_share(("device",))),
    Family("cpu_hit_token_rate", "gauge", (), "Tokens cached in host memory, of all.",
           _hit_share(("host",))),
    Family("prefix_cache_token_num", "counter", (), "Cached tokens.", _cached_tokens(ALL)),
    Family("prefix_gpu_cache_token_num", "counter", (), "Tokens cached on the device.",
           _cached_tokens(("device",))),
    Family("prefix_cpu_cache_token_num", "counter", (), "Tokens cached in host memory.",
           _cached_tokens(("host",))),
    Family("prefix_ssd_cache_token_num", "counter", (), "Tokens cached in storage.",
           _cached_tokens(("storage",))),
    Family("available_gpu_block_num", "gauge", (), "Device blocks that are free or evictable.",
           one(lambda s: s.statistics.prefix.blocks_free + s.statistics.prefix.evictable)),
    Family("free_gpu_block_num", "gauge", (), "Free device blocks.",
           one(lambda s: s.statistics.prefix.blocks_free)),
    Family("max_gpu_block_num", "gauge", (), "Device blocks.",
           one(lambda s: s.summary.device_blocks)),
    Family("max_cpu_block_num", "gauge", (), "Host slots.", one(lambda s: s.summary.host_slots)),
    Family("available_gpu_resource", "gauge", (), "Free device blocks, of all.",
           one(lambda s: _rate(s.statistics.prefix.blocks_free, s.summary.device_blocks))),
    Family("gpu_cache_usage_perc", "gauge", (), "Device blocks in use, of all.",
           one(lambda s: _usage(s)["device"])),
)  # fmt: skip
"""The metrics that FastDeploy's router and dashboards read, under FastDeploy's names."""
