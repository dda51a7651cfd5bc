"""Tiers for engines that own device blocks and block hashes: see `TierCache`."""

from typing import TYPE_CHECKING, Any

from kvactors.tier_cache.answers import (
    CopiesInFlight,
    Lookup,
    StoreSlots,
    TierEvent,
    TierHealth,
    TierStatistics,
)
from kvactors.tier_cache.cache import TierCache, open_tiers
from kvactors.tier_cache.settings import TierConfig, TierGroup, TierStorage
from kvactors.tier_cache.slots import SlotMemory, shared_memory
from kvactors.tier_cache.storage import StorageResult, StorageTier, open_storage

if TYPE_CHECKING:
    from kvactors.tier_cache.copies import CopyResult, CopyWorker

__all__ = [
    "CopiesInFlight",
    "CopyResult",
    "CopyWorker",
    "Lookup",
    "SlotMemory",
    "StorageResult",
    "StorageTier",
    "StoreSlots",
    "TierCache",
    "TierConfig",
    "TierEvent",
    "TierGroup",
    "TierHealth",
    "TierStatistics",
    "TierStorage",
    "open_storage",
    "open_tiers",
    "shared_memory",
]


def __getattr__(name: str) -> Any:
    if name not in ("CopyResult", "CopyWorker"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvactors.tier_cache import copies

    return getattr(copies, name)
