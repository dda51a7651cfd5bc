"""`Config`: all settings of a cache, from TOML, a mapping or the constructor, with environment
variables for what they leave unset. Settings that contradict each other, and those that are given
and have no use, are errors that name the setting and the remedy."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar
from urllib.parse import quote

import msgspec
from msgspec.structs import replace

from kvactors.errors import ConfigError
from kvactors.settings.check import (
    NAMES,
    InPlaceOf,
    Setting,
    UsedIf,
    Variable,
    changed_in,
    checked_value,
    convert,
    describe,
    in_bytes,
    logger,
    read,
    read_toml,
    settings_of,
    structs_of,
    unknown,
)
from kvactors.settings.mooncake import MooncakeConfig, resolve
from kvactors.settings.ranks import RanksConfig
from kvactors.settings.sinks import (
    MODEL_VERSION,
    NAMESPACE,
    SDK_USED,
    AnySinkConfig,
    AttentionStoreConfig,
    AttentionStoreSinkConfig,
    sink_faults,
)
from kvactors.settings.tables import (
    BACKENDS,
    LAYOUTS,
    SHARED,
    ActorsConfig,
    CacheConfig,
    DeviceConfig,
    FlushConfig,
    HintsConfig,
    HostConfig,
    LayoutConfig,
    QuotaConfig,
    StorageConfig,
)
from kvactors.settings.valkey import ValkeyConfig, with_variables

C = TypeVar("C", bound="Config")
M = TypeVar("M")


class Config(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All settings of a cache. `msgspec.to_builtins` gives a mapping for `from_mapping`, without
    the values left at their defaults."""

    cache: CacheConfig = CacheConfig()
    device: DeviceConfig = DeviceConfig()
    layout: LayoutConfig = LayoutConfig()
    host: HostConfig = HostConfig()
    storage: StorageConfig = StorageConfig()
    flush: FlushConfig = FlushConfig()
    attention_store: Annotated[AttentionStoreConfig, SDK_USED] = AttentionStoreConfig()
    actors: ActorsConfig = ActorsConfig()
    ranks: RanksConfig = RanksConfig()
    quota: QuotaConfig = QuotaConfig()
    hints: HintsConfig = HintsConfig()

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Read a TOML file.

        Raises:
            ConfigError: names the fault in the file.
            OSError: the file cannot be read.
        """
        return cls.from_mapping(read_toml(path))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Self:
        """Check a mapping (as TOML gives it).

        Raises:
            ConfigError: names the fault in the mapping.
        """
        config, faults = cls.check_mapping(data)
        if faults:
            raise ConfigError(faults[0])
        return config

    @classmethod
    def check_mapping(cls, data: Mapping[str, Any]) -> tuple[Self, list[str]]:
        """The config of a mapping and its faults. The config is complete only without faults."""
        config, faults = read(data, cls)
        return config, faults or list(contradictions(config, data))

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, base: Config | None = None
    ) -> Config:
        """`base`, with environment variables for the values that it leaves unset.

        KVACTORS_MODEL; FD_AS_ONLY_FLUSH (0 or 1), AS_NAMESPACE, AS_POD_NAME, AS_MODEL_VERSION,
        AS_WRITE_TOTAL_TIMEOUT, AS_WRITE_SLICE_BLOCK_NUM, AS_WRITE_SLICE_TIMEOUT, ENABLE_EP_DP_IN_FD
        (0 or 1). The file back end adds FILE_BACKEND_STORAGE_DIR. The mooncake back end adds
        MOONCAKE_CONFIG_PATH and MOONCAKE_*, the valkey back end KVACTORS_VALKEY_*. Ranks add
        KVACTORS_RANKS_SECRET. Unset or empty variables change nothing. A variable that differs from
        the value in the base is logged and not used, as is a name that resembles one of this list
        (docs/how-to/fastdeploy.md).

        Args:
            environ: the variables, the process's environment if None.
            base: the config whose unset values are filled, the defaults if None.

        Raises:
            ConfigError: names an invalid value, or the fault in the base.
        """
        environ = os.environ if environ is None else environ
        base = base or Config()
        config = convert(base, type(base))  # it may have been constructed
        for fault in _without_use(config, {}):
            raise ConfigError(fault)
        config = _filled(config, environ)
        for fault in _disagreements(config):
            raise ConfigError(fault)
        _check_model(config)
        config.ranks.check_exposure()
        _log_misspelt(environ)
        return config


# -- settings without use, or given twice


def contradictions(config: Config, data: Mapping[str, Any] | None = None) -> Iterator[str]:
    """Settings of a config that must not be given together. data: the mapping that the config was
    made from. A setting counts as given if it is in the mapping or differs from its default."""
    yield from _without_use(config, data or {})
    yield from _disagreements(config)


def _without_use(config: Config, data: Mapping[str, Any]) -> Iterator[str]:
    tables = {name: getattr(config, name) for name in settings_of(Config)}
    changed = {f"{name}.{one}" for name, table in tables.items() for one in changed_in(table)}
    given = changed | {f"{name}.{one}" for name in tables for one in data.get(name, ())}
    for blocks, size in replaced(config).items():
        if blocks in given:
            yield (
                f"{blocks} = {attrgetter(blocks)(config)} and {size} = "
                f"{attrgetter(size)(config)!r} are the same size in blocks and in bytes: remove one"
            )
    for name, known in (("layout.kind", LAYOUTS), ("storage.backend", BACKENDS)):
        value = attrgetter(name)(config)
        if value not in known and ":" not in value:
            yield f"{unknown(name, value, list(known))}, or package.module:Class"
    for name, rule in unused(config).items():
        if name in (given if rule.at_default else changed):
            why = rule.why.format(config)
            yield f"{name} has no use {why}: remove it, or choose what uses it"


def unused(config: Config) -> dict[str, UsedIf]:
    """The settings (`table.name`) that have no use in a config, with the condition that fails."""
    of_tables = settings_of(Config)
    return {
        f"{table}.{name}": rule
        for table, name, setting in _all_settings()
        for rule in reversed(_marks(setting, UsedIf) or _marks(of_tables[table], UsedIf))
        if not rule.holds(config)
    }


def replaced(config: Config) -> dict[str, str]:
    """The sizes in blocks (`table.name`) in whose place one in bytes is given."""
    return {
        f"{table}.{mark.blocks}": f"{table}.{name}"
        for table, name, setting in _all_settings()
        for mark in _marks(setting, InPlaceOf)
        if getattr(getattr(config, table), name) is not None
    }


def _all_settings() -> list[tuple[str, str, Setting]]:
    """Table, name and description of every setting."""
    tables = {table: settings_of(_table_of(table)) for table in settings_of(Config)}
    return [(table, name, one) for table, some in tables.items() for name, one in some.items()]


def _marks(setting: Setting, kind: type[M]) -> list[M]:
    return [mark for mark in setting.marks if isinstance(mark, kind)]


# -- settings that must agree


def _disagreements(config: Config) -> Iterator[str]:
    for table, one in (("device", config.device), ("host", config.host)):
        if one.low_watermark > one.high_watermark:
            yield (
                f"0 <= {table}.low_watermark <= {table}.high_watermark <= 1 must hold, not "
                f"{one.low_watermark} and {one.high_watermark}"
            )
    if config.flush.retry_max_s < config.flush.retry_min_s:
        yield "flush.retry_max_s must not be below flush.retry_min_s"
    for name in ("device.capacity_bytes", "host.capacity_bytes", "host.transit_bytes"):
        size = attrgetter(name)(config)
        if size is not None and in_bytes(size, name) == 0:
            yield f"{name} must be at least 1, not {size!r}"
    yield from _storage_faults(config.storage)
    yield from _group_faults(config)
    tensor_parallel, ranks = config.layout.tensor_parallel, config.ranks.count
    yield from config.ranks.faults(tensor_parallel)
    yield from config.attention_store.faults(tensor_parallel, ranks)
    yield from sink_faults(config.flush.sinks)
    yield from quota_faults(config.quota, config.storage, ranks)


def _group_faults(config: Config) -> Iterator[str]:
    groups = config.cache.groups
    names = [group.name for group in groups]
    if len(set(names)) < len(names) or "" in names:
        yield f"cache.groups need different names, not {names}"
    if groups and config.ranks.count > 1:
        yield "cache.groups and ranks.count above 1 cannot be combined"
    if groups and config.storage.backend == "attention_store":
        yield (
            "cache.groups and storage.backend = 'attention_store' cannot be combined: it has the "
            "blocks of a whole prefix"
        )
    if config.layout.kind == "state":
        yield "layout.kind 'state' is for a group: put the layout into cache.groups"
    for group in groups:
        is_state, where = group.kind == "state", f"cache.groups {group.name!r}"
        if is_state != (group.layout.kind == "state"):
            yield f"{where}: kind {group.kind!r} and layout.kind {group.layout.kind!r} do not fit"
        if is_state == (group.window > 0) or group.window == 1:
            yield (
                f"{where}: window is the tokens that a layer of kind 'window' attends to, at least "
                f"2, and not of kind 'state' (window = {group.window})"
            )


def _storage_faults(storage: StorageConfig) -> Iterator[str]:
    if storage.rank >= storage.ranks:
        yield f"storage.rank must be below storage.ranks ({storage.ranks}), not {storage.rank}"
    for name in ("storage.capacity_blocks", "storage.capacity_bytes"):
        size = getattr(storage, name.partition(".")[2])
        if size is not None and in_bytes(size, name) == 0:
            yield (
                f"{name} must be at least 1, not {size!r}: leave it out for 80 % of the free "
                "space, or set storage.backend = 'none' for no store"
            )
    if fault := storage.url_fault():
        yield fault
    name = storage.namespace
    is_plain = name.isprintable() and "/" not in name and name not in ("", ".", "..")
    if not is_plain or len(name.encode()) > 200:
        yield f"storage.namespace must be a plain name of at most 200 bytes, not {name[:220]!r}"


def quota_faults(quota: QuotaConfig, storage: StorageConfig, ranks: int) -> Iterator[str]:
    """Quotas that no tier can keep."""
    of_storage = [quota.storage, *(one.storage for one in quota.salts.values())]
    if of_storage.count(None) < len(of_storage):
        if storage.backend in (*SHARED, "attention_store"):
            yield (
                "quota.storage needs a store whose space this process manages: "
                f"{storage.backend} evicts its objects itself, for all its nodes together. Use "
                "storage.backend = 'file', or a pool for each tenant"
            )
        if ranks > 1:
            yield (
                f"quota.storage needs one rank, not {ranks}: ranks evict from separate stores. "
                "Bound the stores by storage.capacity_bytes"
            )
    if any("\ud800" <= letter <= "\udfff" for salt in quota.salts for letter in salt):
        yield "quota.salts has a surrogate that UTF-8 cannot encode"


def _check_model(config: Config) -> None:
    """Raise ConfigError if blocks outlive or leave this process, and no model is set to distinguish
    them from those of another model."""
    if config.cache.model:
        return
    storage = "none" if config.flush.flush_only else config.storage.backend
    users = [f"storage.backend = {storage!r}"] if storage not in ("none", "memory") else []
    indexes = [sink for sink in config.flush.sinks if sink.kind == "attention_store"]
    users += [f"flush.sinks {sink.label!r}" for sink in indexes]
    if users:
        raise ConfigError(
            f"cache.model is needed with {users[0]}, which outlives this process or is shared with "
            "others: set cache.model to the name and version of the model, or the variable "
            "KVACTORS_MODEL (or attention_store.namespace or AS_NAMESPACE)"
        )


def _table_of(name: str) -> type[msgspec.Struct]:
    return structs_of(settings_of(Config)[name].hint)[0]


# -- environment variables: FastDeploy's, Mooncake's and our own

OURS = ("KVACTORS_", "FD_", "AS_")
"""Prefixes of names that may be misspelt names of variables that are honoured."""

POOLS = {"storage.mooncake": MooncakeConfig, "storage.valkey": ValkeyConfig}

SIMILAR = 0.8
"""Similarity of a name to that of a variable from which on it is taken for a misspelt one."""

_logged: set[str] = set()  # each name once a process


def variables_of(setting: str) -> tuple[str, ...]:
    """The variables that may set a setting (`table.name`)."""
    path, _, name = setting.rpartition(".")
    if path in ("flush.sinks", "cache.groups"):
        return ()
    struct = POOLS.get(path) or _table_of(path)
    found = [mark.name for mark in _marks(settings_of(struct)[name], Variable)]
    found += ["AS_NAMESPACE", "AS_MODEL_VERSION"] if setting == "cache.model" else []
    found += ["MOONCAKE_CONFIG_PATH"] if struct is MooncakeConfig else []
    return tuple(found)


@lru_cache
def honoured() -> frozenset[str]:
    """The variables that set something, beside Mooncake's."""
    names = [f"{table}.{name}" for table, name, _ in _all_settings()] + ["storage.valkey.url"]
    return frozenset(variable for name in names for variable in variables_of(name))


def _filled(config: C, environ: Mapping[str, str]) -> C:
    config = _with_variables(config, "attention_store", environ)
    config = _with_variables(config, "flush", environ)
    if config.storage.backend == "file":
        config = _with_variables(config, "storage", environ)
    if config.storage.backend == "mooncake":
        config = _with_mooncake(config, environ)
    if config.storage.backend == "valkey":
        server = with_variables(config.storage.valkey, environ)
        config = replace(config, storage=replace(config.storage, valkey=server))
    config = replace(config, flush=replace(config.flush, sinks=_sinks(config)))
    config = _with_model(_with_variables(config, "cache", environ))
    return replace(config, ranks=config.ranks.with_secret(environ))


def _with_variables(config: C, name: str, environ: Mapping[str, str]) -> C:
    table = getattr(config, name)
    for field, setting in settings_of(_table_of(name)).items():
        for variable in _marks(setting, Variable):
            value, current = _value_of(variable, setting, environ), getattr(table, field)
            if value is None:
                continue
            if current not in (None, ""):
                _log_difference(variable, f"{name}.{field}", current, value)
                continue
            try:
                checked_value(f"{name}.{field}", value, setting.hint)
            except ConfigError as error:
                raise ConfigError(f"{variable.name}: {error}") from None
            table = replace(table, **{field: value})
    return replace(config, **{name: table})


def _value_of(variable: Variable, setting: Setting, environ: Mapping[str, str]) -> Any:
    """The value that a variable has for a setting, None for an unset or empty one."""
    name, text = variable.name, environ.get(variable.name, "")
    if variable.switch is not None:
        if (text := text.strip()) not in ("", "0", "1"):
            raise ConfigError(f"{name} must be 0 or 1, not {text!r}")
        return variable.switch[int(text)] if text else None
    if not text:
        return None
    for kind in (int, float):
        if describe(setting.hint).startswith(NAMES[kind]):
            try:
                return kind(text)
            except ValueError:
                raise ConfigError(f"{name} must be a number, not {text!r}") from None
    return text


def _with_mooncake(config: C, environ: Mapping[str, str]) -> C:
    pool = resolve(config.storage.mooncake, environ)
    for name, setting in settings_of(MooncakeConfig).items():
        for variable in _marks(setting, Variable):
            if text := environ.get(variable.name):
                value = str(getattr(pool, name))
                _log_difference(variable, f"storage.mooncake.{name}", value, text)
    return replace(config, storage=replace(config.storage, mooncake=pool))


def _sinks(config: Config) -> tuple[AnySinkConfig, ...]:
    """The sinks, with AttentionStore's index in flush-only mode with AttentionStore as the back
    end: FastDeploy's settings name the back end alone, and mean the index, to which FastDeploy
    sends each finished request's full path."""
    sinks = config.flush.sinks
    if not config.flush.flush_only or config.storage.backend != "attention_store":
        return sinks
    if any(sink.kind == "attention_store" for sink in sinks):
        return sinks
    return (*sinks, AttentionStoreSinkConfig(announce="full"))


def _with_model(config: C) -> C:
    """The config with a model: `cache.model`, or else AttentionStore's namespace and model version,
    if one of the two is set. Mooncake's settings name no model."""
    store = config.attention_store
    if config.cache.model or not (store.namespace or store.model_version):
        return config
    names = (store.namespace or NAMESPACE, store.model_version or MODEL_VERSION)
    model = "/".join(quote(name, safe="") for name in names)
    return replace(config, cache=replace(config.cache, model=model))


def _log_difference(variable: Variable, setting: str, value: Any, other: Any) -> None:
    if value != other and variable.name not in _logged:
        _logged.add(variable.name)
        logger().warning(
            "variable not used: the config has another value",
            variable=variable.name,
            setting=setting,
            value=value,
        )


def _log_misspelt(environ: Mapping[str, str]) -> None:
    """Log names that look like one of those that are honoured, and are none."""
    known = honoured()
    for name in environ:
        if name in known or name in _logged or not name.startswith(OURS):
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=SIMILAR)
        if near or name.startswith(OURS[0]):
            _logged.add(name)
            hint = {"similar_to": near[0]} if near else {}
            logger().warning("unknown variable, not used", variable=name, **hint)
