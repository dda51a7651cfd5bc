"""Check for settings without a use in their configuration: a setting that would be ignored is an
error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvactors.config_tables import ConfigTables
from kvactors.errors import ConfigError
from kvactors.ranges import unknown

LAYOUT_USES = {
    "gqa": {"num_kv_heads", "head_dim", "dtype", "quantization", "scale_dtype"},
    "mla": {"kv_lora_rank", "qk_rope_head_dim", "dtype"},
    "dsa": {"kv_lora_rank", "qk_rope_head_dim", "index_head_dim"},
}
LAYOUT_COMMON = {
    "kind",
    "num_layers",
    "layer_offset",
    "extra_layers",
    "extra_block_ratio",
    "tensor_parallel",
}

STORE_COMMON = {"backend", "write_policy", "min_hits", "fetch", "timeout_s"}
SLOT_STORE = STORE_COMMON | {
    "exclusive",
    "min_fetch_blocks",
    "readers",
    "writers",
    "on_full",
    "on_full_wait_s",
}
CAPACITY = {"capacity_blocks", "capacity_bytes"}
PLACE = {"namespace", "rank", "ranks"}
STORAGE_USES = {
    "none": SLOT_STORE | PLACE,
    "memory": SLOT_STORE | CAPACITY | PLACE,
    "file": SLOT_STORE
    | CAPACITY
    | PLACE
    | {
        "directory",
        "free_space_floor",
        "durability",
        "read_only",
        "io_depth",
        "io_write_depth",
        "keep_tokens",
        "scrub_rate",
    },
    "mooncake": SLOT_STORE | PLACE | {"mooncake"},
    "attention_store": STORE_COMMON | {"exclusive"},
}
"""Settings of `[storage]` by back end. `exclusive` with a store that does not support it is a
separate error."""

DEVICE_ONLY = {"place": "paddle", "ordinal": "cuda"}
TIER_ONLY = ("low_watermark", "high_watermark")

ALTERNATIVES = (
    ("device", "num_blocks", "capacity_bytes"),
    ("host", "slots", "capacity_bytes"),
    ("host", "transit_slots", "transit_bytes"),
)
"""Sizes that are given in blocks or in bytes."""


def check_applicable(config: ConfigTables, data: Mapping[str, Any] | None = None) -> None:
    """Raise ConfigError for a setting that is given and has no use, or a size that is given in
    blocks and in bytes. See `contradictions`."""
    for text in contradictions(config, data):
        raise ConfigError(text)


def contradictions(config: ConfigTables, data: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Settings that are given and have no use, and sizes that are given in blocks and in bytes.

    Args:
        config: the settings.
        data: the mapping that the config was made from. A setting counts as given if it is in the
            mapping or differs from its default.
    """
    for name, blocks, size in ALTERNATIVES:
        table = getattr(config, name)
        written = {} if data is None else data.get(name, {})
        if getattr(table, size) is not None and blocks in given_in(table, written):
            yield (
                f"{name}.{blocks} = {getattr(table, blocks)} and {name}.{size} = "
                f"{getattr(table, size)!r} are the same size in blocks and in bytes: remove one"
            )
    yield from _unknown_classes(config)
    for name, reason in _rules(config):
        written = (
            {} if name == "host" or data is None else data.get(name, {})
        )  # watermarks of 0 are off, which is no contradiction
        given = given_in(getattr(config, name), written)
        for setting, why in reason:
            if setting in given:
                yield f"{name}.{setting} has no use {why}: remove it, or choose what uses it"


def unused(config: ConfigTables) -> set[str]:
    """The settings (`table.name`) that must not be given beside those of a config."""
    found = {f"{table}.{name}" for table, reasons in _rules(config) for name, _ in reasons}
    return found | {
        f"{table}.{blocks}"
        for table, blocks, size in ALTERNATIVES
        if getattr(getattr(config, table), size) is not None
    }


def _unknown_classes(config: ConfigTables) -> Iterator[str]:
    """Values that are neither one of those known nor a class by its path."""
    for name, value, known in (
        ("layout.kind", config.layout.kind, LAYOUT_USES),
        ("storage.backend", config.storage.backend, STORAGE_USES),
    ):
        if value not in known and ":" not in value:
            yield f"{unknown(name, value, list(known))}, or package.module:Class"


def given_in(table: msgspec.Struct, data: Mapping[str, Any]) -> set[str]:
    """Names of the settings of a table that were given."""
    default = type(table)()
    changed = {
        name for name in table.__struct_fields__ if getattr(table, name) != getattr(default, name)
    }
    return changed | set(data)


def _rules(config: ConfigTables) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    yield "layout", list(_layout(config))
    yield (
        "device",
        [
            (name, f"with device.kind {config.device.kind!r}")
            for name, kind in DEVICE_ONLY.items()
            if config.device.kind != kind
        ],
    )
    yield (
        "host",
        list(_host(config)),
    )
    yield "storage", list(_storage(config))
    yield "attention_store", list(_attention_store(config))


def _host(config: ConfigTables) -> Iterator[tuple[str, str]]:
    host = config.host
    if not host.slots and host.capacity_bytes is None:
        for name in TIER_ONLY:
            yield name, "without a host tier (host.slots = 0)"
    if not host.staging_bytes:
        yield "staging_min_bytes", "with host.staging_bytes = 0"


def _layout(config: ConfigTables) -> Iterator[tuple[str, str]]:
    layout = config.layout
    used = LAYOUT_USES.get(layout.kind)
    if used is None:  # of another package
        return
    for name in layout.__struct_fields__:
        if name not in used | LAYOUT_COMMON:
            yield name, f"with layout.kind {layout.kind!r}"
    if layout.kind == "gqa" and layout.quantization == "none":
        yield "scale_dtype", "without layout.quantization"
    if not layout.extra_layers:
        yield "extra_block_ratio", "without layout.extra_layers"


def _storage(config: ConfigTables) -> Iterator[tuple[str, str]]:
    storage = config.storage
    used = STORAGE_USES.get(storage.backend)
    if used is None:  # of another package
        return
    for name in storage.__struct_fields__:
        if name not in used:
            yield name, f"with storage.backend {storage.backend!r}"


def _attention_store(config: ConfigTables) -> Iterator[tuple[str, str]]:
    sinks = any(sink.kind == "attention_store" for sink in config.flush.sinks)
    if sinks or config.storage.backend == "attention_store":
        return
    for name in config.attention_store.__struct_fields__:
        if (
            name not in ("namespace", "model_version") or config.cache.model
        ):  # without cache.model, the two name the model
            yield name, "without a sink or a storage back end of that kind"
