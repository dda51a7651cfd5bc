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
from vllm.v1.kv_offload.tiering.base import TieringOffloadingMetrics as Tiering

from kvactors.tier_cache import TierCache, TierStatistics

HOST, STORAGE = ("kvactors_host",), ("kvactors_storage",)
"""Values of the label `tier`."""

HEALTHY = "vllm:kv_offload_healthy"
REFUSED, UNSAVED = "vllm:kv_offload_refused_stores", "vllm:kv_offload_unsaved_chunks"
"""vLLM's tiers have no such metrics. `LLM.get_metrics` lists names that begin with `vllm:` only."""

PIECES = {
    Cpu.CPU_CACHE_USAGE_PERC: "copies, reads and writes",
    Cpu.CPU_CACHE_WRITE_USAGE_PERC: "copies from the device",
    Cpu.CPU_CACHE_READ_USAGE_PERC: "copies to the device, reads and writes",
}
COUNTERS = {
    Tiering.READ_BYTES: "Bytes read from a tier into the host tier.",
    Tiering.WRITE_BYTES: "Bytes written from the host tier to a tier.",
    Tiering.PROMOTION_JOB_FAILURES: "Chunks that a tier did not return: corrupt, missing or late.",
    Tiering.CASCADE_JOB_FAILURES: "Chunks that a tier did not take.",
    Tiering.CHUNK_HITS: "Chunks loaded to the device, by the tier that they came from.",
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
    **{name: OffloadingCounterMetadata(text, ("tier",)) for name, text in COUNTERS.items()},
    Tiering.PROMOTION_ALLOCATION_FAILURES: OffloadingCounterMetadata(
        "Look-ups of stored chunks that were misses since no host slot could be had."
    ),
    REFUSED: OffloadingCounterMetadata(
        "Chunks of the device that were not stored because no host slot was free for too long."
    ),
    UNSAVED: OffloadingCounterMetadata("Evicted chunks that were to be saved, and were not."),
}


class Metrics:
    """Collects what the metrics show."""

    def __init__(self) -> None:
        self._allocations: list[int] = []
        self._last: TierStatistics | None = None

    def allocated(self, count: int) -> None:
        """A store took `count` slots."""
        self._allocations.append(count)

    def stats(self, tiers: TierCache) -> OffloadingConnectorStats:
        """The metrics since the last call."""
        stats = OffloadingConnectorStats()
        now = tiers.statistics()
        self._set_gauges(stats, now, len(tiers.copies_in_flight().stores))
        stats.set_gauge(HEALTHY, float(tiers.health().status == "ok"))
        for count in self._allocations:
            stats.observe_histogram(Cpu.CPU_ALLOCATION_SIZE, count)
        self._allocations.clear()
        last = self._last or now._replace(**dict.fromkeys(now._fields, 0))
        self._last = now
        for name, label, field in FIELDS:
            grown = getattr(now, field) - getattr(last, field)
            if grown:
                stats.increase_counter(name, grown, label)
        return stats

    @staticmethod
    def _set_gauges(stats: OffloadingConnectorStats, now: TierStatistics, writing: int) -> None:
        stats.set_gauge(Cpu.CPU_CACHE_USAGE_PERC, now.pinned / now.slots)
        stats.set_gauge(Cpu.CPU_CACHE_WRITE_USAGE_PERC, writing / now.slots)
        stats.set_gauge(Cpu.CPU_CACHE_READ_USAGE_PERC, max(0, now.pinned - writing) / now.slots)


FIELDS = (
    (Tiering.READ_BYTES, STORAGE, "fetched_bytes"),
    (Tiering.WRITE_BYTES, STORAGE, "saved_bytes"),
    (Tiering.PROMOTION_JOB_FAILURES, STORAGE, "failed_fetches"),
    (Tiering.CASCADE_JOB_FAILURES, STORAGE, "failed_saves"),
    (Tiering.CHUNK_HITS, HOST, "host_hits"),
    (Tiering.CHUNK_HITS, STORAGE, "storage_hits"),
    (Tiering.PROMOTION_ALLOCATION_FAILURES, (), "refused_fetches"),
    (REFUSED, (), "refused_stores"),
    (UNSAVED, (), "unsaved"),
)
"""Counters: name, label, and the field of `TierStatistics`."""
