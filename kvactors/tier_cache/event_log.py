"""Changes of the tiers that an engine's publisher has not taken yet. Pure state."""

from __future__ import annotations

from collections.abc import Iterable

from kvactors.tier_cache.answers import TierEvent
from kvactors.tier_cache.sink_feed import SinkFeed
from kvactors.types import Reason, Tier


class EventLog:
    """Collects changes of some tiers, in order.

    Args:
        tiers: the tiers whose changes are collected.
        feed: takes the changes of other tiers, for sinks.
    """

    def __init__(self, tiers: Iterable[Tier], feed: SinkFeed | None = None) -> None:
        self.tiers = frozenset(tiers)
        self.feed = feed
        self._events: list[TierEvent] = []

    def record(self, tier: Tier, stored: bool, keys: Iterable[bytes], reason: Reason) -> None:
        """The tier holds the keys now (stored), or does not any more."""
        if tier in self.tiers:
            if found := tuple(keys):
                self._events.append(TierEvent(tier, stored, found, reason))
        elif self.feed is not None and tier in self.feed.tiers and (found := tuple(keys)):
            self.feed.record(tier, stored, found, reason)

    def wants(self, tier: Tier) -> bool:
        """Whether the changes of a tier are collected."""
        return tier in self.tiers or (self.feed is not None and tier in self.feed.tiers)

    def take(self) -> list[TierEvent]:
        """The changes since the last call."""
        events, self._events = self._events, []
        return events
