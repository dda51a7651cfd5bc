"""Sinks of a `TierCache`, from settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from kvactors.config_faults import with_class_paths
from kvactors.errors import ConfigError
from kvactors.identity import CacheScope
from kvactors.tier_cache.sink_feed import SinkFeed
from kvactors.types import Tier

if TYPE_CHECKING:
    from kvactors.flush_notifier.sinks.base import Sink
    from kvactors.tier_cache.settings import TierConfig
    from kvactors.tier_cache.sink_service import SinkService

BELOW = ("host", "storage")


class TierSinks(NamedTuple):
    """The sinks of one cache.

    Attributes:
        feed: the part of the owner's thread.
        service: the part on the event loop.
    """

    feed: SinkFeed
    service: SinkService


def make_sinks(config: TierConfig, given: Sequence[Sink]) -> TierSinks | None:
    """The sinks of a config and those of a caller, None for none.

    Raises:
        ConfigError: a sink does not fit a cache whose engine owns the device and the block hashes.
        SinkError: a sink lacks what it needs.
    """
    if not isinstance(given, list | tuple):
        raise ConfigError(f"sinks must be a list of Sink objects, not {given!r:.80}")
    if not config.sinks and not given:
        return None
    from kvactors.flush_notifier.sinks.base import Sink
    from kvactors.tier_cache.sink_service import SinkService

    for sink in given:
        if not isinstance(sink, Sink):
            raise ConfigError(f"sinks must be Sink objects, not {sink!r:.80}")
    if config.tokens_per_block < 1:
        raise ConfigError("tokens_per_block is needed with sinks: they are sent the tokens")
    sinks = [*(_from_table(table, config) for table in config.sinks), *given]
    if len({sink.name for sink in sinks}) < len(sinks):
        raise ConfigError("sinks need different names")
    tiers: set[Tier] = set()
    for sink in sinks:
        tiers |= _checked(sink, config)
    feed = SinkFeed(
        tiers,
        config.tokens_per_block,
        CacheScope(config.model, config.storage.namespace),
        config.fingerprint,
        config.num_slots,
    )
    return TierSinks(feed, SinkService(feed, sinks))


def _from_table(table: Mapping[str, Any], config: TierConfig) -> Sink:
    from kvactors.sink_config import (
        AnySinkConfig,
        AttentionStoreSinkConfig,
        ClassSinkConfig,
        JsonLinesSinkConfig,
        KvEventsSinkConfig,
        check_sinks,
    )

    try:
        data = with_class_paths({"tiers": BELOW, **table}, AnySinkConfig)
        settings = msgspec.convert(data, AnySinkConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"sinks: {error}") from error
    check_sinks([settings])
    if isinstance(settings, AttentionStoreSinkConfig):
        raise ConfigError(
            f"sink {settings.label!r}: AttentionStore's index finds blocks by the hashes that "
            "kvactors computes from tokens, and here the engine computes the hashes"
        )
    if isinstance(settings, ClassSinkConfig):
        from kvactors.flush_notifier.sinks import make_class_sink

        return make_class_sink(settings, config.tokens_per_block)
    if isinstance(settings, KvEventsSinkConfig):
        from kvactors.flush_notifier.sinks.kv_events import KvEventsSink

        return KvEventsSink(settings.for_model(config.model), config.tokens_per_block)
    if isinstance(settings, JsonLinesSinkConfig):
        from kvactors.flush_notifier.sinks.jsonl import JsonLinesSink

        return JsonLinesSink(settings, config.tokens_per_block)
    from kvactors.flush_notifier.sinks.memory import MemorySink

    return MemorySink(settings, config.tokens_per_block)


def _checked(sink: Sink, config: TierConfig) -> set[Tier]:
    """The tiers that a sink is sent."""
    wanted = sink.filter
    tiers = {tier for tier in (Tier.HOST, Tier.STORAGE) if wanted.tiers & tier}
    if wanted.tiers & Tier.DEVICE:
        raise ConfigError(f"sink {sink.name!r}: the engine reports tier 'device' itself")
    if wanted.by_tokens or sink.by_tokens:
        raise ConfigError(
            f"sink {sink.name!r} identifies blocks by tokens alone, and an engine's keys may stand "
            "for more"
        )
    if wanted.node or wanted.at_finish:
        raise ConfigError(
            f"sink {sink.name!r}: granularity must be 'per_tier' and report_gains_at 'commit': the "
            "engine reports no device blocks and no ends of requests"
        )
    both = _names(tiers).intersection(config.events)
    if both:
        raise ConfigError(
            f"tier {min(both)!r} is in events and in sink {sink.name!r}: an index that reads both "
            "would count its blocks twice. Name it in one of them"
        )
    return tiers


def _names(tiers: Iterable[Tier]) -> set[str]:
    return {str(tier.name).lower() for tier in tiers}
