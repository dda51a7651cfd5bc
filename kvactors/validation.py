"""Checks of settings: ranges, and what must agree. ConfigError names the setting and what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvactors.errors import ConfigError
from kvactors.mooncake_config import in_bytes
from kvactors.sink_config import check_sinks

if TYPE_CHECKING:
    from kvactors.config import Config, StorageConfig


def validate(config: Config) -> None:
    """Raise ConfigError for values that do not make sense, naming the key."""
    at_least = (
        ("cache.block_size", config.cache.block_size, 1),
        ("device.num_blocks", config.device.num_blocks, 1),
        ("host.slots", config.host.slots, 0),
        ("host.transit_slots", config.host.transit_slots, 1),
        ("host.copy_threads", config.host.copy_threads, 1),
        ("storage.capacity_blocks", config.storage.capacity_blocks, 0),
        ("storage.min_fetch_blocks", config.storage.min_fetch_blocks, 1),
        ("storage.io_depth", config.storage.io_depth, 1),
        ("storage.ranks", config.storage.ranks, 1),
        ("storage.rank", config.storage.rank, 0),
        ("storage.readers", config.storage.readers, 1),
        ("storage.writers", config.storage.writers, 1),
        ("storage.min_hits", config.storage.min_hits, 1),
        ("flush.batch", config.flush.batch, 1),
        ("actors.channel_bound", config.actors.channel_bound, 1),
        ("actors.restarts", config.actors.restarts, 0),
        ("ranks.count", config.ranks.count, 1),
        ("layout.num_layers", config.layout.num_layers, 1),
        ("layout.num_kv_heads", config.layout.num_kv_heads, 1),
        ("layout.head_dim", config.layout.head_dim, 1),
    )
    for name, value, low in at_least:
        if value < low:
            raise ConfigError(f"{name} must be at least {low}, not {value}")
    positive = (
        ("cache.deadline", config.cache.deadline),
        ("storage.timeout", config.storage.timeout),
        ("flush.timeout", config.flush.timeout),
        ("flush.retry_min", config.flush.retry_min),
        ("ranks.timeout", config.ranks.timeout),
        ("ranks.start", config.ranks.start),
        ("actors.drain", config.actors.drain),
    )
    for name, seconds in positive:
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"{name} must be a positive number of seconds, not {seconds}")
    _validate_pair("device.free_low", config.device.free_low, "device.free_high", config.device.free_high)
    _validate_pair("host.low_watermark", config.host.low_watermark, "host.high_watermark", config.host.high_watermark)
    if config.flush.retry_max < config.flush.retry_min:
        raise ConfigError("flush.retry_max must not be below flush.retry_min")
    validate_storage(config.storage)
    config.ranks.check(config.layout.tensor_parallel, config.storage.backend)
    config.attention_store.check()
    check_sinks(config.flush.sinks)


def validate_storage(storage: StorageConfig) -> None:
    """Raise ConfigError for what the storage tier cannot be."""
    if storage.rank >= storage.ranks:
        raise ConfigError(f"storage.rank must be below storage.ranks ({storage.ranks}), not {storage.rank}")
    for name in ("capacity_bytes", "free_space_floor"):
        in_bytes(getattr(storage, name), f"storage.{name}")
    if not storage.namespace or "/" in storage.namespace or storage.namespace in (".", ".."):
        raise ConfigError(f"storage.namespace must be a plain name, not {storage.namespace!r}")


def _validate_pair(low_name: str, low: float, high_name: str, high: float) -> None:
    if not 0 <= low <= high <= 1:
        raise ConfigError(f"0 <= {low_name} <= {high_name} <= 1 must hold, not {low} and {high}")


def validate_model(config: Config) -> None:
    """Raise ConfigError if blocks outlive or leave this process, and no model is set to tell them from those of another model."""
    if config.cache.model:
        return
    storage = "none" if config.flush.only else config.storage.backend
    users = [f"storage.backend = {storage!r}"] if storage not in ("none", "memory") else []
    users += [f"flush.sinks {sink.label!r}" for sink in config.flush.sinks if sink.kind == "attention_store"]
    if users:
        raise ConfigError(
            f"cache.model is needed with {users[0]}, which outlives this process or is shared with others: set cache.model to the name "
            "and version of the model, or the variable KVACTORS_MODEL (or attention_store.namespace or AS_NAMESPACE)"
        )
