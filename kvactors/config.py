"""Configuration: `Config`, read from TOML, a mapping or environment variables. Rejects unknown keys
and suggests the nearest valid one."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from kvactors.config_tables import (
    ActorsConfig,
    CacheConfig,
    ConfigTables,
    DeviceConfig,
    FlushConfig,
    HostConfig,
    LayoutConfig,
    StorageConfig,
)
from kvactors.environment import from_environment
from kvactors.errors import ConfigError
from kvactors.ranks_config import RanksConfig
from kvactors.renamed_settings import modern_names
from kvactors.validation import validate

__all__ = [
    "ActorsConfig",
    "CacheConfig",
    "Config",
    "DeviceConfig",
    "FlushConfig",
    "HostConfig",
    "LayoutConfig",
    "RanksConfig",
    "StorageConfig",
    "check_keys",
    "convert",
    "read_toml",
]

S = TypeVar("S", bound=msgspec.Struct)


class Config(ConfigTables, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """All settings of a cache. `msgspec.to_builtins` gives a mapping for `from_mapping`, without
    the values left at their defaults."""

    @classmethod
    def from_toml(cls, path: str | Path) -> Config:
        """Read a TOML file.

        Raises:
            ConfigError: names the fault in the file.
            OSError: the file cannot be read.
        """
        return cls.from_mapping(read_toml(path))

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Config:
        """Check a mapping (as TOML gives it).

        Raises:
            ConfigError: names the fault in the mapping.
        """
        data = modern_tables(data, cls)
        config = convert(data, cls)
        validate(config, data)
        return config

    @classmethod
    def from_env(
        cls, environ: Mapping[str, str] | None = None, base: Config | None = None
    ) -> Config:
        """`base`, with environment variables for the values that it leaves unset.

        KVACTORS_MODEL; FD_AS_ONLY_FLUSH (0 or 1), AS_NAMESPACE, AS_POD_NAME, AS_MODEL_VERSION,
        AS_WRITE_TOTAL_TIMEOUT, AS_WRITE_SLICE_BLOCK_NUM, AS_WRITE_SLICE_TIMEOUT, ENABLE_EP_DP_IN_FD
        (0 or 1). The file back end adds FILE_BACKEND_STORAGE_DIR. The mooncake back end adds
        MOONCAKE_CONFIG_PATH and MOONCAKE_*. Ranks add KVACTORS_RANKS_SECRET. Unset or empty
        variables change nothing. A variable that differs from the value in the base is logged and
        not used, as is a name that resembles a variable of this list. docs/fastdeploy.md has
        FastDeploy's others.

        Args:
            environ: the variables, the process's environment if None.
            base: the config whose unset values are filled, the defaults if None.

        Raises:
            ConfigError: names an invalid value, or the fault in the base.
        """
        return from_environment(base or Config(), os.environ if environ is None else environ)


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as a mapping. ConfigError if it is not TOML in UTF-8."""
    try:
        return tomllib.loads(Path(path).read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error


def convert(data: Mapping[str, Any], kind: type[S]) -> S:
    """A mapping as a struct. ConfigError names the first unknown key with the nearest valid one, or
    the ill-typed value."""
    data = modern_tables(data, kind)
    check_keys(data, kind, "")
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error


def check_keys(data: Any, kind: Any, where: str) -> None:
    """Raise ConfigError for the first key that `kind` (a struct, a union of tagged ones, or a tuple
    of either) does not have."""
    kinds = list(_structs(kind))
    for item in data if isinstance(data, list | tuple) else [data]:
        if kinds and isinstance(item, Mapping):
            _check_struct_keys(item, _pick(item, kinds, where), where)


def modern_tables(data: Any, kind: Any, where: str = "") -> Any:
    """Data for `kind` with the names that its settings have today. Each earlier name warns.

    Raises:
        ConfigError: a setting is given under both names.
    """
    kinds = list(_structs(kind))
    if isinstance(data, list | tuple):
        return [modern_tables(item, kind, where) for item in data]
    if not kinds or not isinstance(data, Mapping):
        return data
    struct = _pick(data, kinds, where)
    hints = get_type_hints(struct)
    return {
        key: modern_tables(value, hints[key], f"{where}.{key}" if where else key)
        if key in hints
        else value
        for key, value in modern_names(data, struct, where, stacklevel=2).items()
    }


def _structs(kind: Any) -> Iterator[type[msgspec.Struct]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind
    for inner in () if get_origin(kind) is dict else get_args(kind):
        yield from _structs(inner)


def _pick(
    data: Mapping[str, Any], kinds: list[type[msgspec.Struct]], where: str
) -> type[msgspec.Struct]:
    """The struct of a union that the data's tag names."""
    field = kinds[0].__struct_config__.tag_field
    if field is None:
        return kinds[0]
    tags = {str(kind.__struct_config__.tag): kind for kind in kinds}
    if field not in data:
        raise ConfigError(f"{where}.{field} is missing: choose one of {', '.join(tags)}")
    if data[field] not in tags:
        near = difflib.get_close_matches(str(data[field]), tags, n=1, cutoff=0.0)
        raise ConfigError(
            f"unknown {where}.{field} {data[field]!r}. Did you mean {near[0]!r}? There are "
            f"{', '.join(tags)}"
        )
    return tags[data[field]]


def _check_struct_keys(data: Mapping[str, Any], struct: type[msgspec.Struct], where: str) -> None:
    hints = get_type_hints(struct)
    for key, value in data.items():
        name = f"{where}.{key}" if where else key
        if key == struct.__struct_config__.tag_field:
            continue
        if key not in hints:
            near = difflib.get_close_matches(key, hints, n=1, cutoff=0.0)
            raise ConfigError(f"unknown key {name!r}. Did you mean {near[0]!r}?")
        check_keys(value, hints[key], name)
