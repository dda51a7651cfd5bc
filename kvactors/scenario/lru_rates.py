"""The hits of LRU tiers of a config's sizes, for comparison with a cache of these settings."""

from __future__ import annotations

from collections.abc import Iterable

from kvactors.config import Config
from kvactors.errors import ConfigError
from kvactors.scenario.sweep import Paths, TierRates, hit_curve, read_paths, tier_rates
from kvactors.scenario.trace import TraceRequest


def rates_of(paths: Paths, config: Config) -> TierRates:
    """The hits of a config's tiers under LRU. A store without a limit holds every block."""
    store = config.storage
    stored = 0
    if store.backend != "none" and not config.flush.flush_only:
        stored = paths.distinct if store.capacity_blocks is None else store.capacity_blocks
    whole = not config.cache.recompute_last_token
    return tier_rates(
        hit_curve(paths, config.device.num_blocks, whole=whole),
        config.device.num_blocks,
        config.host.slots,
        stored,
        exclusive=config.host.mode == "exclusive",
    )


def rates_by_name(rates: TierRates) -> dict[str, float]:
    """For reports."""
    return {
        "device": round(rates.device, 6),
        "host": round(rates.host, 6),
        "storage": round(rates.storage, 6),
        "total": round(rates.total, 6),
        "refused": rates.refused,
    }


def lru_rates(requests: Iterable[TraceRequest], config: Config) -> dict[str, float]:
    """The hit rates that LRU tiers of the same sizes have, if the requests come one after another.

    Empty if every tier of the config is LRU, or if they cannot be had in advance: the store's size
    is given in bytes, or the ids are not chained.
    """
    if "retain" not in (config.device.policy, config.host.policy):
        return {}
    if config.storage.capacity_bytes is not None:
        return {}
    try:
        paths = read_paths(one.ids for one in requests)
    except ConfigError:
        return {}
    rates = rates_by_name(rates_of(paths, config))
    del rates["refused"]
    return rates
