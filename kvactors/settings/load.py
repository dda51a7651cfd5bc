"""The settings of quotas: checks, and sizes in blocks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from kvactors.actor.log import get_logger
from kvactors.errors import ConfigError
from kvactors.quotas import Quota, Quotas
from kvactors.settings.check import (
    check_values,
    hints_of,
    in_blocks,
    in_bytes,
    unknown,
    value_fault,
)
from kvactors.settings.mooncake import VARIABLES, resolve
from kvactors.settings.ranks import SECRET_VARIABLE
from kvactors.settings.sinks import (
    MODEL_VERSION,
    NAMESPACE,
    AnySinkConfig,
    AttentionStoreConfig,
    AttentionStoreSinkConfig,
    check_sinks,
)
from kvactors.settings.tables import ConfigTables, QuotaConfig, SaltQuota, StorageConfig


def check_quota(config: QuotaConfig, storage: StorageConfig, ranks: int) -> None:
    """Raise ConfigError for a quota that no tier can keep."""
    reason = no_storage_quota(storage, ranks)
    if reason and has_storage_quota(config):
        raise ConfigError(reason)
    for salt in config.salts:
        if any("\ud800" <= letter <= "\udfff" for letter in salt):
            raise ConfigError("quota.salts has a surrogate that UTF-8 cannot encode")


def has_storage_quota(config: QuotaConfig) -> bool:
    """Whether there is a quota of the store."""
    salts = config.salts.values()
    return config.storage is not None or any(one.storage is not None for one in salts)


def no_storage_quota(storage: StorageConfig, ranks: int) -> str:
    """Why a store cannot keep quotas of salts. Empty if it can, as far as the settings tell."""
    if storage.backend in ("mooncake", "attention_store"):
        return (
            f"quota.storage needs a store whose space this process manages: {storage.backend} "
            "evicts its objects itself, for all its nodes together. Use storage.backend = 'file', "
            "or a pool for each tenant"
        )
    if storage.read_only:
        return (
            "quota.storage is kept by the process that writes the store: set it there, or leave "
            "out storage.read_only"
        )
    if ranks > 1:
        return (
            f"quota.storage needs one rank, not {ranks}: ranks evict from separate stores. "
            "Bound the stores by storage.capacity_bytes"
        )
    return ""


def quota_in_blocks(
    name: str, sizes: Sequence[int | str | None], block_bytes: int, object_bytes: int
) -> Quota:
    """A quota in blocks. ConfigError for a size that holds no block.

    Args:
        name: of the quota, for the error.
        sizes: of device, host and storage.
        block_bytes: of a block in memory.
        object_bytes: of a block in the store.
    """
    each = (block_bytes, block_bytes, object_bytes)
    return Quota(
        *(
            None if size is None else in_blocks(size, f"{name}.{tier}", nbytes)
            for tier, size, nbytes in zip(Quota._fields, sizes, each, strict=True)
        )
    )


def quotas_of(config: QuotaConfig, block_bytes: int, object_bytes: int) -> Quotas:
    """The quotas of the settings. ConfigError names the wrong one.

    Args:
        config: the settings.
        block_bytes: of a block in memory.
        object_bytes: of a block in the store.
    """

    def quota(name: str, one: QuotaConfig | SaltQuota) -> Quota:
        sizes = (one.device, one.host, one.storage)
        return quota_in_blocks(name, sizes, block_bytes, object_bytes)

    named = {salt: quota(f"quota.salts.{salt}", one) for salt, one in config.salts.items()}
    return Quotas(quota("quota", config), named)


# -- Check for settings without a use in their configuration: a setting that would be ignored is an
# error.


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


# -- Checks of settings: ranges, and settings that must agree. ConfigError names the setting and the
# remedy.


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


# -- Settings from environment variables: FastDeploy's, Mooncake's, `KVACTORS_MODEL` and
# `KVACTORS_RANKS_SECRET`. See `Config.from_env`.
#
# A variable fills a value that the config leaves unset. Where the config has another value, the
# config is used and the variable is logged. A name that resembles one of those variables, and is
# none, is logged too.


log = get_logger()

C = TypeVar("C", bound=ConfigTables)

TEXTS = {
    "AS_NAMESPACE": "namespace",
    "AS_POD_NAME": "pod_name",
    "AS_MODEL_VERSION": "model_version",
}
NUMBERS: dict[str, tuple[str, type[int | float]]] = {
    "AS_WRITE_TOTAL_TIMEOUT": ("write_total_timeout_s", float),
    "AS_WRITE_SLICE_BLOCK_NUM": ("write_slice_blocks", int),
    "AS_WRITE_SLICE_TIMEOUT": ("write_slice_timeout_s", float),
}

HONOURED = (
    "FD_AS_ONLY_FLUSH",
    *TEXTS,
    *NUMBERS,
    "ENABLE_EP_DP_IN_FD",
    "FILE_BACKEND_STORAGE_DIR",
    "KVACTORS_MODEL",
    "KVACTORS_RANKS_SECRET",
)
"""Variables that set something, beside Mooncake's."""

NOT_HONOURED = (
    "ENABLE_V1_KVCACHE_SCHEDULER",
    "ENABLE_V1_KVCACHE_MANAGER",
    "FD_ENABLE_V1_UPDATE_WEIGHTS",
    "FD_ENABLE_SWAP_SPACE_CLEARING",
    "FD_SAVE_OUTPUT_CACHE_FOR_PREEMPTED_REQUEST",
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL",
    "FD_ENC_DEC_BLOCK_NUM",
    "FD_CACHE_PROC_EXIT_TIMEOUT",
    "FD_CACHE_PROC_ERROR_COUNT",
    "FD_WORKER_ALIVE_TIMEOUT",
    "FD_ENGINE_TASK_QUEUE_WITH_SHM",
    "FD_LOG_DIR",
    "FD_ATTENTION_BACKEND",
    "USE_KVCACHE_LOCK",
    "FD_USE_KVCACHE_LOCK",
    "DISABLE_PREFIX_CACHE_MM_MODEL",
    "MC_MAX_MR_SIZE",
    "MC_TCP_BIND_ADDRESS",
)
"""FastDeploy's variables about its KV cache that set nothing here. docs/how-to/fastdeploy.md has
the reason for each."""

OURS = ("KVACTORS_", "FD_", "AS_")
"""Prefixes of names that may be misspelt names of honoured variables."""

SIMILAR = 0.8

_logged: set[str] = set()  # each name once a process


def variables_of(setting: str) -> tuple[str, ...]:
    """The variables that may set a setting (`table.name`)."""
    found: dict[str, tuple[str, ...]] = {
        f"attention_store.{field}": (name,) for name, field in TEXTS.items()
    }
    found |= {f"attention_store.{field}": (name,) for name, (field, _) in NUMBERS.items()}
    found |= {
        "attention_store.role_suffix": ("ENABLE_EP_DP_IN_FD",),
        "flush.mode": ("FD_AS_ONLY_FLUSH",),
        "storage.directory": ("FILE_BACKEND_STORAGE_DIR",),
        "cache.model": ("KVACTORS_MODEL", "AS_NAMESPACE", "AS_MODEL_VERSION"),
        "ranks.secret": (SECRET_VARIABLE,),
    }
    mooncake = [name for name, field in VARIABLES.items() if setting == f"storage.mooncake.{field}"]
    if setting.startswith("storage.mooncake."):
        return (*mooncake, "MOONCAKE_CONFIG_PATH")
    return found.get(setting, ())


def from_environment(config: C, environ: Mapping[str, str]) -> C:
    """See `Config.from_env`."""
    validate(config)
    replace = msgspec.structs.replace
    config = replace(
        config, attention_store=_filled_attention_store(config.attention_store, environ)
    )
    mode = _fill(
        "flush.mode",
        config.flush.mode,
        {None: None, False: "normal", True: "flush_only"}[_switch(environ, "FD_AS_ONLY_FLUSH")],
        "FD_AS_ONLY_FLUSH",
    )
    config = replace(config, flush=replace(config.flush, mode=mode))
    directory = environ.get("FILE_BACKEND_STORAGE_DIR") or None
    if config.storage.backend == "file" and directory:
        directory = _fill(
            "storage.directory",
            config.storage.directory or None,
            directory,
            "FILE_BACKEND_STORAGE_DIR",
        )
        config = replace(config, storage=replace(config.storage, directory=directory))
    if config.storage.backend == "mooncake":
        mooncake = resolve(config.storage.mooncake, environ)
        for name, field in VARIABLES.items():
            _fill(
                f"storage.mooncake.{field}",
                str(getattr(mooncake, field)),
                environ.get(name) or None,
                name,
            )
        config = replace(config, storage=replace(config.storage, mooncake=mooncake))
    config = replace(config, flush=replace(config.flush, sinks=flush_sinks(config)))
    config = replace(config, cache=replace(config.cache, model=resolve_model(config, environ)))
    config = replace(config, ranks=config.ranks.with_secret(environ))
    check_agreement(config)
    validate_model(config)
    config.ranks.check_exposure()
    _log_misspelt(environ)
    return config


def _filled_attention_store(
    store: AttentionStoreConfig, environ: Mapping[str, str]
) -> AttentionStoreConfig:
    """`[attention_store]`, with FastDeploy's variables where it leaves something unset."""
    found: dict[str, tuple[str, Any]] = {
        field: (name, environ[name]) for name, field in TEXTS.items() if environ.get(name)
    }
    found |= {
        field: (name, _number(environ[name], kind, name))
        for name, (field, kind) in NUMBERS.items()
        if environ.get(name)
    }
    if (suffix := _switch(environ, "ENABLE_EP_DP_IN_FD")) is not None:
        found["role_suffix"] = ("ENABLE_EP_DP_IN_FD", suffix)
    filled = {
        field: _fill(
            f"attention_store.{field}",
            None if getattr(store, field) == "" else getattr(store, field),
            value,
            name,
        )
        for field, (name, value) in found.items()
    }
    return msgspec.structs.replace(store, **filled)


def _fill(setting: str, value: Any, variable: Any, name: str) -> Any:
    """A setting's value: the config's if it has one, or else the variable's. If they differ, that
    is logged. ConfigError for a variable that is used and cannot be."""
    if value is None or variable is None:
        return _checked(setting, variable, name) if value is None else value
    if value != variable and name not in _logged:
        _logged.add(name)
        log.warning(
            "variable not used: the config has another value",
            variable=name,
            setting=setting,
            value=value,
        )
    return value


def _checked(setting: str, variable: Any, name: str) -> Any:
    try:
        check_setting(setting, variable)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return variable


def _log_misspelt(environ: Mapping[str, str]) -> None:
    """Log names that look like one of those that are honoured, and are none."""
    for name in environ:
        if name in HONOURED or name in NOT_HONOURED or name in _logged or not name.startswith(OURS):
            continue
        near = difflib.get_close_matches(name, HONOURED, n=1, cutoff=SIMILAR)
        if near or name.startswith(OURS[0]):
            _logged.add(name)
            hint = {"similar_to": near[0]} if near else {}
            log.warning("unknown variable, not used", variable=name, **hint)


def flush_sinks(config: ConfigTables) -> tuple[AnySinkConfig, ...]:
    """The sinks, with AttentionStore's index in flush-only mode with AttentionStore as the back
    end: FastDeploy's settings name the back end alone, and mean the index, to which FastDeploy
    sends each finished request's full path."""
    sinks = config.flush.sinks
    if not config.flush.flush_only or config.storage.backend != "attention_store":
        return sinks
    if any(sink.kind == "attention_store" for sink in sinks):
        return sinks
    return (*sinks, AttentionStoreSinkConfig(announce="full"))


def resolve_model(config: ConfigTables, environ: Mapping[str, str]) -> str:
    """The model: `cache.model`, or else KVACTORS_MODEL, or else AttentionStore's namespace and
    model version, if one of the two is set. Empty if none is. Mooncake's settings name no
    model."""
    variable, store = environ.get("KVACTORS_MODEL") or None, config.attention_store
    model = _fill("cache.model", config.cache.model or None, variable, "KVACTORS_MODEL") or ""
    if not model and (store.namespace or store.model_version):
        namespace, version = store.namespace or NAMESPACE, store.model_version or MODEL_VERSION
        model = f"{quote(namespace, safe='')}/{quote(version, safe='')}"
    return str(model)


def _number(text: str, kind: type[int | float], name: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} must be a number, not {text!r}") from None


def _switch(environ: Mapping[str, str], name: str) -> bool | None:
    value = environ.get(name, "").strip()
    if value not in ("", "0", "1"):
        raise ConfigError(f"{name} must be 0 or 1, not {value!r}")
    return None if not value else value == "1"
