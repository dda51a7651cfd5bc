"""Counters of a `TierCache`. Pure state."""

from __future__ import annotations

from kvactors.tier_cache.answers import TierStatistics


class TierCounters:
    """Events since the start. See `TierStatistics`."""

    def __init__(self) -> None:
        self.host_hits = self.storage_hits = self.stored = self.failed_stores = 0
        self.evicted = self.refused_stores = self.unsaved = 0
        self.fetched = self.failed_fetches = self.fetched_bytes = 0
        self.saved = self.failed_saves = self.saved_bytes = 0

    def statistics(
        self, *, refused_fetches: int, slots: int, resident: int, pinned: int, stored_objects: int
    ) -> TierStatistics:
        """The counters, with sizes of this moment."""
        return TierStatistics(
            host_hits=self.host_hits,
            storage_hits=self.storage_hits,
            stored=self.stored,
            failed_stores=self.failed_stores,
            evicted=self.evicted,
            refused_stores=self.refused_stores,
            unsaved=self.unsaved,
            fetched=self.fetched,
            failed_fetches=self.failed_fetches,
            refused_fetches=refused_fetches,
            saved=self.saved,
            failed_saves=self.failed_saves,
            fetched_bytes=self.fetched_bytes,
            saved_bytes=self.saved_bytes,
            slots=slots,
            resident=resident,
            pinned=pinned,
            stored_objects=stored_objects,
        )
