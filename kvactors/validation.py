"""Checks of settings: ranges, and settings that must agree. ConfigError names the setting and the
remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from kvactors.applicable import check_applicable
from kvactors.config_tables import ConfigTables, StorageConfig
from kvactors.errors import ConfigError
from kvactors.quota_settings import check_quota
from kvactors.ranges import check_values, hints_of, value_fault
from kvactors.sink_config import check_sinks
from kvactors.sizes import in_bytes

CONFIG_TABLES = (
    "cache",
    "device",
    "layout",
    "host",
    "storage",
    "flush",
    "attention_store",
    "actors",
    "ranks",
    "quota",
    "hints",
)


def validate(config: ConfigTables, data: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError, naming the setting, for values that are not valid. data: the mapping that
    the config was made from, if there was one."""
    for name in CONFIG_TABLES:
        check_values(getattr(config, name), name)
    check_applicable(config, data)
    check_agreement(config)


def check_setting(name: str, value: Any) -> None:
    """Raise ConfigError for the value of a setting (`table.field`) that is not allowed. None is."""
    hint: Any = ConfigTables
    for part in name.split("."):
        hint = hints_of(hint)[part]
    if value is not None and (fault := value_fault(name, value, hint)):
        raise ConfigError(fault)


def check_agreement(config: ConfigTables) -> None:
    """Raise ConfigError for settings that contradict each other."""
    for check in _agreements(config):
        check()


def disagreements(config: ConfigTables) -> Iterator[str]:
    """Every error of `check_agreement`, not only the first."""
    for check in _agreements(config):
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _agreements(config: ConfigTables) -> Iterator[Callable[[], None]]:
    for name, table in (("device", config.device), ("host", config.host)):
        low, high = table.low_watermark, table.high_watermark
        yield partial(_validate_pair, f"{name}.low_watermark", low, f"{name}.high_watermark", high)
    yield partial(_validate_retries, config)
    for name, size in (
        ("device.capacity_bytes", config.device.capacity_bytes),
        ("host.capacity_bytes", config.host.capacity_bytes),
        ("host.transit_bytes", config.host.transit_bytes),
    ):
        yield partial(_validate_size, name, size)
    yield partial(validate_storage, config.storage)
    yield partial(config.ranks.check, config.layout.tensor_parallel)
    yield partial(config.attention_store.check, config.layout.tensor_parallel, config.ranks.count)
    yield partial(check_sinks, config.flush.sinks)
    yield partial(check_quota, config.quota, config.storage, config.ranks.count)


def _validate_retries(config: ConfigTables) -> None:
    if config.flush.retry_max_s < config.flush.retry_min_s:
        raise ConfigError("flush.retry_max_s must not be below flush.retry_min_s")


def _validate_size(name: str, size: int | str | None) -> None:
    if size is not None and in_bytes(size, name) == 0:
        raise ConfigError(f"{name} must be at least 1, not {size!r}")


def validate_storage(storage: StorageConfig) -> None:
    """Raise ConfigError for settings of the storage tier that are not possible."""
    if storage.rank >= storage.ranks:
        raise ConfigError(
            f"storage.rank must be below storage.ranks ({storage.ranks}), not {storage.rank}"
        )
    in_bytes(storage.free_space_floor, "storage.free_space_floor")
    in_bytes(storage.scrub_rate, "storage.scrub_rate")
    size = storage.capacity_bytes
    for setting, none in (
        ("capacity_blocks", storage.capacity_blocks == 0),
        ("capacity_bytes", size is not None and in_bytes(size, "storage.capacity_bytes") == 0),
    ):
        if none:
            raise ConfigError(
                f"storage.{setting} must be at least 1, not {getattr(storage, setting)!r}: leave "
                "it out for 80 % of the free space, or set "
                "storage.backend = 'none' for no store"
            )
    name = storage.namespace
    if (
        not name
        or "/" in name
        or name in (".", "..")
        or len(name.encode()) > 200
        or not name.isprintable()
    ):
        raise ConfigError(
            f"storage.namespace must be a plain name of at most 200 bytes, not {name[:220]!r}"
        )


def _validate_pair(low_name: str, low: float, high_name: str, high: float) -> None:
    if not 0 <= low <= high <= 1:
        raise ConfigError(f"0 <= {low_name} <= {high_name} <= 1 must hold, not {low} and {high}")


def validate_model(config: ConfigTables) -> None:
    """Raise ConfigError if blocks outlive or leave this process, and no model is set to distinguish
    them from those of another model."""
    if config.cache.model:
        return
    storage = "none" if config.flush.flush_only else config.storage.backend
    users = [f"storage.backend = {storage!r}"] if storage not in ("none", "memory") else []
    users += [
        f"flush.sinks {sink.label!r}"
        for sink in config.flush.sinks
        if sink.kind == "attention_store"
    ]
    if users:
        raise ConfigError(
            f"cache.model is needed with {users[0]}, which outlives this process or is shared with "
            "others: set cache.model to the name "
            "and version of the model, or the variable KVACTORS_MODEL (or "
            "attention_store.namespace or AS_NAMESPACE)"
        )
