"""Tiers for engines that own device blocks and block hashes: see `TierCache`."""

from kvactors.tier_cache.answers import Lookup, StoreSlots, TierEvent
from kvactors.tier_cache.cache import TierCache, open_tiers
from kvactors.tier_cache.settings import TierConfig
from kvactors.tier_cache.slot_memory import SlotMemory, shared_memory

__all__ = [
    "Lookup",
    "SlotMemory",
    "StoreSlots",
    "TierCache",
    "TierConfig",
    "TierEvent",
    "open_tiers",
    "shared_memory",
]
