"""Tiers for engines that own device blocks and block hashes: see `TierCache`."""

from kvactors.tier_cache.answers import (
    CopiesInFlight,
    Lookup,
    StoreSlots,
    TierEvent,
    TierHealth,
    TierStatistics,
)
from kvactors.tier_cache.cache import TierCache, open_tiers
from kvactors.tier_cache.settings import TierConfig, TierStorage
from kvactors.tier_cache.slot_memory import SlotMemory, shared_memory
from kvactors.tier_cache.storage_jobs import StorageResult
from kvactors.tier_cache.storage_tier import StorageTier
from kvactors.tier_cache.stores import open_storage

__all__ = [
    "CopiesInFlight",
    "Lookup",
    "SlotMemory",
    "StorageResult",
    "StorageTier",
    "StoreSlots",
    "TierCache",
    "TierConfig",
    "TierEvent",
    "TierHealth",
    "TierStatistics",
    "TierStorage",
    "open_storage",
    "open_tiers",
    "shared_memory",
]
