"""Settings of a cache: their tables with ranges and rules, read and checked by `Config`."""

from kvactors.settings.check import convert, read_toml
from kvactors.settings.load import Config
from kvactors.settings.ranks import RanksConfig
from kvactors.settings.tables import (
    ActorsConfig,
    CacheConfig,
    DeviceConfig,
    FlushConfig,
    HintsConfig,
    HostConfig,
    LayoutConfig,
    QuotaConfig,
    SaltQuota,
    StorageConfig,
)

__all__ = [
    "ActorsConfig",
    "CacheConfig",
    "Config",
    "DeviceConfig",
    "FlushConfig",
    "HintsConfig",
    "HostConfig",
    "LayoutConfig",
    "QuotaConfig",
    "RanksConfig",
    "SaltQuota",
    "StorageConfig",
    "convert",
    "read_toml",
]
