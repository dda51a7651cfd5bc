"""Metrics under the names that vLLM's own tiers have."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPUOffloadingMetrics as Cpu

from kvactors.tier_cache import TierCache, TierStatistics
from kvactors.tier_cache.metrics import COUNTERS

PREFIX = "vllm:kv_offload_"
"""`LLM.get_metrics` lists names that begin with `vllm:` only."""
HEALTHY = f"{PREFIX}healthy"

PIECES = {
    Cpu.CPU_CACHE_USAGE_PERC: "copies, reads and writes",
    Cpu.CPU_CACHE_WRITE_USAGE_PERC: "copies from the device",
    Cpu.CPU_CACHE_READ_USAGE_PERC: "copies to the device, reads and writes",
}

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    **{
        name: OffloadingGaugeMetadata(f"Part of the host tier's slots in {use}, 0 to 1.")
        for name, use in PIECES.items()
    },
    Cpu.CPU_ALLOCATION_SIZE: OffloadingHistogramMetadata(
        "Slots that each store of a request took.", buckets=tuple(4**i for i in range(10))
    ),
    HEALTHY: OffloadingGaugeMetadata("1 while every tier and sink works."),
    **{
        PREFIX + name: OffloadingCounterMetadata(text, tuple(label for label, _ in labels))
        for name, labels, _, text in COUNTERS
    },
}


class OffloadCounters:
    """Collects what the metrics show."""

    def __init__(self) -> None:
        self._allocations: list[int] = []
        self._last: TierStatistics | None = None

    def allocated(self, count: int) -> None:
        """A store took `count` slots."""
        self._allocations.append(count)

    def stats(self, tiers: TierCache) -> OffloadingConnectorStats:
        stats = OffloadingConnectorStats()
        now = tiers.statistics()
        self._set_gauges(stats, now, len(tiers.copies_in_flight().stores))
        stats.set_gauge(HEALTHY, float(tiers.health().status == "ok"))
        for count in self._allocations:
            stats.observe_histogram(Cpu.CPU_ALLOCATION_SIZE, count)
        self._allocations.clear()
        last = self._last or now._replace(**dict.fromkeys(now._fields, 0))
        self._last = now
        for name, labels, field, _ in COUNTERS:
            grown = getattr(now, field) - getattr(last, field)
            if grown:
                tier = tuple(f"kvactors_{value}" for _, value in labels)
                stats.increase_counter(PREFIX + name, grown, tier)
        return stats

    @staticmethod
    def _set_gauges(stats: OffloadingConnectorStats, now: TierStatistics, writing: int) -> None:
        stats.set_gauge(Cpu.CPU_CACHE_USAGE_PERC, now.pinned / now.slots)
        stats.set_gauge(Cpu.CPU_CACHE_WRITE_USAGE_PERC, writing / now.slots)
        stats.set_gauge(Cpu.CPU_CACHE_READ_USAGE_PERC, max(0, now.pinned - writing) / now.slots)
