"""The metrics of a `TierCache`: those of a cache that have the same meaning, under the same names.
`tier_cache.metrics` has further ones, under the names of vLLM's tiers.
"""

from __future__ import annotations

from typing import NamedTuple

from kvactors.observe.metrics import Family, Samples, by, one
from kvactors.tier_cache.answers import TierHealth, TierStatistics
from kvactors.tier_cache.settings import TierConfig


class TierSnapshot(NamedTuple):
    """Everything that the metrics of a `TierCache` show, as of one moment."""

    config: TierConfig
    statistics: TierStatistics
    health: TierHealth


def _blocks(s: TierSnapshot) -> dict[str, float]:
    return {"host": s.statistics.resident, "storage": s.statistics.stored_objects}


def _capacity(s: TierSnapshot) -> dict[str, float]:
    return {"host": s.statistics.slots, "storage": s.config.storage.capacity_blocks or 0}


def _bytes(s: TierSnapshot) -> dict[str, float]:
    return {tier: blocks * s.config.block_bytes for tier, blocks in _blocks(s).items()}


def _moved(s: TierSnapshot) -> dict[str, float]:
    found, size = s.statistics, s.config.block_bytes
    return {
        "device_to_host": found.stored * size,
        "host_to_device": (found.host_hits + found.storage_hits) * size,
        "host_to_storage": found.saved_bytes,
        "storage_to_host": found.fetched_bytes,
    }


def _status(s: TierSnapshot) -> dict[str, float]:
    return {status: float(s.health.status == status) for status in ("ok", "degraded", "closed")}


def _info(s: TierSnapshot) -> Samples:
    config = s.config
    values = (config.model, str(config.block_bytes), str(config.num_slots), config.storage.backend)
    return [(values, 1.0)]


TIER_FAMILIES: tuple[Family, ...] = (
    Family("kv_block_hits", "counter", ("tier",),
           "Blocks loaded to the device, by the tier that they came from.",
           by(lambda s: {"host": s.statistics.host_hits, "storage": s.statistics.storage_hits})),
    Family("kv_cache_usage_perc", "gauge", ("tier",),
           "Part of the capacity of a tier that is in use, 0 to 1.",
           by(lambda s: {"host": s.statistics.resident / s.statistics.slots})),
    Family("tier_capacity_blocks", "gauge", ("tier",),
           "Blocks that a tier holds at most, 0 without a limit in blocks.", by(_capacity)),
    Family("tier_blocks", "gauge", ("tier",), "Blocks in a tier.", by(_blocks)),
    Family("tier_bytes", "gauge", ("tier",), "Bytes of the blocks in a tier.", by(_bytes)),
    Family("host_slots_pinned", "gauge", (), "Host slots that a transfer uses.",
           one(lambda s: s.statistics.pinned)),
    Family("kv_offload_total_bytes", "counter", ("transfer_type",), "Bytes moved between tiers.",
           by(_moved)),
    Family("blocks_evicted", "counter", ("tier",), "Blocks that left a tier for others.",
           by(lambda s: {"host": s.statistics.evicted})),
    Family("copy_failures", "counter", (), "Blocks whose copy to a host slot failed.",
           one(lambda s: s.statistics.failed_stores)),
    Family("write_failures", "counter", (), "Blocks that the store did not take.",
           one(lambda s: s.statistics.failed_saves)),
    Family("health", "gauge", ("status",), "1 for the present status.", by(_status)),
    Family("cache_config_info", "info", ("model", "block_bytes", "host_slots", "store"),
           "Sizes and parts of the cache.", _info),
)  # fmt: skip
