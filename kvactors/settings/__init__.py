"""Configuration: `Config`, read from TOML, a mapping or environment variables. Rejects unknown keys
and suggests the nearest valid one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvactors.settings.check import check_keys, convert, read_toml
from kvactors.settings.load import from_environment, validate
from kvactors.settings.ranks import RanksConfig
from kvactors.settings.tables import (
    ActorsConfig,
    CacheConfig,
    ConfigTables,
    DeviceConfig,
    FlushConfig,
    HostConfig,
    LayoutConfig,
    StorageConfig,
)

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
        not used, as is a name that resembles a variable of this list. docs/how-to/fastdeploy.md has
        FastDeploy's others.

        Args:
            environ: the variables, the process's environment if None.
            base: the config whose unset values are filled, the defaults if None.

        Raises:
            ConfigError: names an invalid value, or the fault in the base.
        """
        return from_environment(base or Config(), os.environ if environ is None else environ)
