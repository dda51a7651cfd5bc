"""Counters of a `TierCache`. Pure state."""

from __future__ import annotations


class TierCounters:
    """Events since the start. See `TierStatistics`."""

    def __init__(self) -> None:
        self.host_hits = self.storage_hits = self.stored = self.failed_stores = 0
        self.evicted = self.refused_stores = self.unsaved = 0
        self.fetched = self.failed_fetches = self.fetched_bytes = 0
        self.saved = self.failed_saves = self.saved_bytes = 0
