"""Types and ranges of every setting, in one place. ConfigError names the setting, the value and the
bound."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints

import msgspec

from kvactors.errors import ConfigError


class Range(NamedTuple):
    """Bounds of a number.

    Attributes:
        open: the lower bound itself is not allowed.
    """

    low: float
    high: float
    open: bool = False


COUNT = Range(1, 1 << 31)
"""Bounds of a count that is at least one: blocks, layers, heads."""

NUMBER = Range(0, 1 << 31)
THREADS = Range(1, 256)
SECONDS = Range(0, 1e9, open=True)
SHARE = Range(0, 1)

RANGES = {
    "cache.block_size": Range(1, 1 << 20),
    "cache.default_deadline_s": SECONDS,
    "device.num_blocks": COUNT,
    "device.ordinal": Range(0, 1023),
    "device.low_watermark": SHARE,
    "device.high_watermark": SHARE,
    "layout.num_layers": Range(1, 1 << 16),
    "layout.num_kv_heads": Range(1, 1 << 16),
    "layout.head_dim": Range(1, 1 << 16),
    "layout.kv_lora_rank": Range(1, 1 << 20),
    "layout.qk_rope_head_dim": Range(1, 1 << 16),
    "layout.index_head_dim": Range(1, 1 << 16),
    "layout.layer_offset": Range(0, 1 << 16),
    "layout.extra_layers": Range(0, 1 << 16),
    "layout.extra_block_ratio": Range(1, 1 << 10),
    "layout.tensor_parallel": Range(1, 1 << 10),
    "host.slots": NUMBER,
    "host.transit_slots": COUNT,
    "host.low_watermark": SHARE,
    "host.high_watermark": SHARE,
    "host.copy_threads": THREADS,
    "host.numa_node": Range(0, 1023),
    "host.dma_min_bytes": Range(0, 1 << 40),
    "storage.capacity_blocks": Range(0, 1 << 40),
    "storage.rank": NUMBER,
    "storage.ranks": COUNT,
    "storage.io_depth": Range(1, 1024),
    "storage.min_hits": COUNT,
    "storage.min_fetch_blocks": COUNT,
    "storage.readers": THREADS,
    "storage.writers": THREADS,
    "storage.timeout": SECONDS,
    "storage.mooncake.timeout": SECONDS,
    "storage.mooncake.connect_timeout": SECONDS,
    "flush.timeout": SECONDS,
    "flush.retry_min": SECONDS,
    "flush.retry_max": SECONDS,
    "flush.batch": Range(1, 1 << 20),
    "attention_store.shard_id": NUMBER,
    "attention_store.shard_num": COUNT,
    "attention_store.layer_num": NUMBER,
    "attention_store.bytes_per_shard_layer_per_block": Range(0, 1 << 40),
    "attention_store.device_id": Range(0, 1023),
    "attention_store.dp_id": NUMBER,
    "attention_store.ready_timeout": SECONDS,
    "attention_store.ready_interval": SECONDS,
    "attention_store.write_slice_blocks": COUNT,
    "attention_store.write_slice_timeout": SECONDS,
    "attention_store.write_total_timeout": Range(0, 1e9),
    "actors.channel_bound": Range(1, 1 << 20),
    "actors.open_timeout_s": SECONDS,
    "actors.drain_timeout_s": SECONDS,
    "actors.max_restarts_per_minute": Range(0, 1 << 20),
    "ranks.count": Range(1, 1 << 10),
    "ranks.timeout": SECONDS,
    "ranks.startup_timeout_s": SECONDS,
}
"""Bounds of every number among the settings. `SinkConfig.check` checks the numbers of sinks."""

LONGEST = 4096
"""Characters in a text setting."""


@lru_cache
def hints_of(struct: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a struct's fields."""
    return get_type_hints(struct)


def check_values(settings: msgspec.Struct, where: str = "") -> None:
    """Raise ConfigError for the first value of a struct, nested structs included, that has
    another type than its field or is out of range."""
    for name, value in fields_of(settings):
        full = f"{where}.{name}" if where else name
        if isinstance(value, msgspec.Struct):
            check_values(value, full)
        elif isinstance(value, tuple) and any(isinstance(item, msgspec.Struct) for item in value):
            for item in value:
                check_values(item, full)
        else:
            _check_value(full, value, hints_of(type(settings))[name])


def fields_of(settings: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """A struct's fields and their values."""
    if not isinstance(settings, msgspec.Struct):
        raise ConfigError(f"a table of settings was expected, not {settings!r}")
    for name in settings.__struct_fields__:
        yield name, getattr(settings, name)


def _check_value(name: str, value: Any, hint: Any) -> None:
    if isinstance(value, str):
        _check_text(
            name, value
        )  # before its type: an error of a Literal would have all of the text
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}, namely {value!r}") from error
    check_setting(name, value)


def check_setting(name: str, value: Any) -> None:
    """Raise ConfigError for the value of a setting (`table.field`) that has the type of the field
    and is not allowed."""
    if isinstance(value, str):
        _check_text(name, value)
    if isinstance(value, int | float) and not isinstance(value, bool) and name in RANGES:
        check_range(name, value, RANGES[name])


def check_range(name: str, value: float, bounds: Range) -> None:
    """Raise ConfigError for a number outside its range."""
    if bounds is SECONDS and not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a positive number of seconds, not {value}")
    if not value >= bounds.low or (bounds.open and value == bounds.low):
        raise ConfigError(
            f"{name} must be {'above' if bounds.open else 'at least'} {bounds.low:g}, not {value}"
        )
    if value > bounds.high:
        raise ConfigError(f"{name} must be at most {bounds.high:.0f}, not {value}")


def _check_text(name: str, value: str) -> None:
    if "\0" in value or len(value) > LONGEST:
        raise ConfigError(
            f"{name} must have no NUL character and at most {LONGEST} characters, not "
            f"{value[:40]!r}"
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{name} is no text: {error}") from error
