"""The values behind a cache's metrics: statistics, health, and histograms of its operations."""

from __future__ import annotations

from typing import NamedTuple

from kvactors.flush_notifier.steps import Steps
from kvactors.histogram import AGES, BYTES, SECONDS, Histogram
from kvactors.observe.health import Health, health
from kvactors.observe.operations import Operation, OperationWatch
from kvactors.observe.statistics import CacheStatistics, collect
from kvactors.observe.tenants import TenantStatistics, named_tenants
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


def take_snapshot(system: System, watch: MetricsWatch, leaked: int) -> Steps[Snapshot]:
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
