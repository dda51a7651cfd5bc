"""Settings from environment variables: FastDeploy's, Mooncake's, `KVACTORS_MODEL` and `KVACTORS_RANKS_SECRET`. See `Config.from_env`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from kvactors.errors import ConfigError
from kvactors.mooncake_config import resolve
from kvactors.sink_config import AnySinkConfig, AttentionStoreConfig, AttentionStoreSinkConfig
from kvactors.validation import check_agreement, validate, validate_model

if TYPE_CHECKING:
    from kvactors.config import Config


def from_environment(config: Config, environ: Mapping[str, str]) -> Config:
    """See `Config.from_env`."""
    validate(config)
    only, suffix = _switch(environ, "FD_AS_ONLY_FLUSH"), _switch(environ, "ENABLE_EP_DP_IN_FD")
    texts = {"namespace": "AS_NAMESPACE", "pod_name": "AS_POD_NAME", "model_version": "AS_MODEL_VERSION"}
    store: dict[str, Any] = {field: environ[name] for field, name in texts.items() if environ.get(name)}
    store |= {} if suffix is None else {"role_suffix": suffix}
    numbers = {"write_total_timeout": float, "write_slice_blocks": int, "write_slice_timeout": float}
    names = {"write_slice_blocks": "AS_WRITE_SLICE_BLOCK_NUM"}
    for field, kind in numbers.items():
        name = names.get(field, f"AS_{field.upper()}")
        if environ.get(name):
            store[field] = _number(environ[name], kind, name)
    replace = msgspec.structs.replace
    directory = environ.get("FILE_BACKEND_STORAGE_DIR", "")
    if config.storage.backend == "file" and directory and not config.storage.directory:
        config = replace(config, storage=replace(config.storage, directory=directory))
    if config.storage.backend == "mooncake":
        config = replace(config, storage=replace(config.storage, mooncake=resolve(config.storage.mooncake, environ)))
    if store:
        config = replace(config, attention_store=replace(config.attention_store, **store))
    if only:
        config = replace(config, flush=replace(config.flush, only=True))
    config = replace(config, flush=replace(config.flush, sinks=flush_sinks(config)))
    config = replace(config, cache=replace(config.cache, model=resolve_model(config, environ)))
    config = replace(config, ranks=config.ranks.with_secret(environ))
    check_agreement(config)
    validate_model(config)
    config.ranks.check_exposure()
    return config


def flush_sinks(config: Config) -> tuple[AnySinkConfig, ...]:
    """The sinks, with AttentionStore's index in flush-only mode with AttentionStore as the back end: FastDeploy's settings name the back end
    alone, and mean the index."""
    sinks = config.flush.sinks
    if not config.flush.only or config.storage.backend != "attention_store":
        return sinks
    return sinks if any(sink.kind == "attention_store" for sink in sinks) else (*sinks, AttentionStoreSinkConfig())


def resolve_model(config: Config, environ: Mapping[str, str]) -> str:
    """The model: `cache.model`, or else KVACTORS_MODEL, or else AttentionStore's namespace and model version, where one of these two is not
    its default; empty if none is set. Mooncake's settings name no model."""
    model = config.cache.model or environ.get("KVACTORS_MODEL", "")
    store, default = config.attention_store, AttentionStoreConfig()
    if not model and (store.namespace, store.model_version) != (default.namespace, default.model_version):
        model = f"{quote(store.namespace, safe='')}/{quote(store.model_version, safe='')}"
    return model


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
