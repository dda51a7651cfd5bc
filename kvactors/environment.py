"""Settings from environment variables: FastDeploy's, Mooncake's, `KVACTORS_MODEL` and
`KVACTORS_RANKS_SECRET`. See `Config.from_env`.

A variable fills a value that the config leaves unset. Where the config has another value, the
config is used and the variable is logged. A name that resembles one of those variables, and is
none, is logged too.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from kvactors.actor.log import get_logger
from kvactors.config_tables import ConfigTables
from kvactors.errors import ConfigError
from kvactors.mooncake_config import VARIABLES, resolve
from kvactors.ranks_config import SECRET_VARIABLE
from kvactors.sink_config import (
    MODEL_VERSION,
    NAMESPACE,
    AnySinkConfig,
    AttentionStoreConfig,
    AttentionStoreSinkConfig,
)
from kvactors.validation import check_agreement, check_setting, validate, validate_model

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
    config = replace(config, attention_store=_attention_store(config.attention_store, environ))
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


def _attention_store(
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
