"""Statistics of a `TierCache` as metrics, under the names that vLLM's tiers have."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvactors.tier_cache.answers import TierHealth, TierStatistics

PREFIX = "kvactors:kv_offload_"  # vLLM's metrics begin with `vllm:kv_offload_`


class TierMetric(NamedTuple):
    """One sample, as a collector for Prometheus needs it."""

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    labels: tuple[tuple[str, str], ...]
    value: float


HOST, STORAGE = (("tier", "host"),), (("tier", "storage"),)

HITS = "Blocks loaded, by the tier that they came from."

COUNTERS: tuple[tuple[str, tuple[tuple[str, str], ...], str, str], ...] = (
    ("tiering_chunk_hits", HOST, "host_hits", HITS),
    ("tiering_chunk_hits", STORAGE, "storage_hits", HITS),
    ("tiering_read_bytes", STORAGE, "fetched_bytes", "Bytes read from a tier into host slots."),
    ("tiering_write_bytes", STORAGE, "saved_bytes", "Bytes written from host slots to a tier."),
    (
        "tiering_promotion_job_failures",
        STORAGE,
        "failed_fetches",
        "Blocks that a tier did not return.",
    ),
    ("tiering_cascade_job_failures", STORAGE, "failed_saves", "Blocks that a tier did not take."),
    (
        "tiering_promotion_allocation_failures",
        (),
        "refused_fetches",
        "Stored blocks that were misses because no host slot was free for too long.",
    ),
    ("stored_chunks", (), "stored", "Blocks copied from the device to host slots."),
    ("stores_failed", (), "failed_stores", "Copies from the device that failed."),
    (
        "refused_stores",
        (),
        "refused_stores",
        "Blocks of the device that were not stored because no host slot was free for too long.",
    ),
    ("evicted_chunks", HOST, "evicted", "Blocks that left the host tier for others."),
    ("unsaved_chunks", (), "unsaved", "Evicted blocks that were to be saved, and were not."),
)
"""Name, labels, field of `TierStatistics`, explanation."""


def tier_metrics(statistics: TierStatistics, health: TierHealth) -> tuple[TierMetric, ...]:
    """The metrics of one cache."""
    counters = [
        TierMetric(PREFIX + name, "counter", text, labels, float(getattr(statistics, field)))
        for name, labels, field, text in COUNTERS
    ]
    slots = statistics.slots
    return (
        *counters,
        _gauge("cpu_cache_usage_perc", "Part of the slots in use.", statistics.pinned / slots),
        _gauge(
            "cpu_cache_fill_perc", "Part of the slots with blocks.", statistics.resident / slots
        ),
        _gauge("stored_objects", "Objects in storage.", float(statistics.stored_objects)),
        _gauge("healthy", "1 while every tier and sink works.", float(health.status == "ok")),
    )


def _gauge(name: str, text: str, value: float) -> TierMetric:
    return TierMetric(PREFIX + name, "gauge", text, (), value)
