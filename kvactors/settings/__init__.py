"""Settings of a cache: their tables with ranges and rules, read and checked by `Config`."""

from kvactors.settings.check import convert as convert
from kvactors.settings.check import read_toml as read_toml
from kvactors.settings.load import Config as Config
from kvactors.settings.ranks import RanksConfig as RanksConfig
from kvactors.settings.tables import ActorsConfig as ActorsConfig
from kvactors.settings.tables import CacheConfig as CacheConfig
from kvactors.settings.tables import DeviceConfig as DeviceConfig
from kvactors.settings.tables import FlushConfig as FlushConfig
from kvactors.settings.tables import HintsConfig as HintsConfig
from kvactors.settings.tables import HostConfig as HostConfig
from kvactors.settings.tables import LayoutConfig as LayoutConfig
from kvactors.settings.tables import QuotaConfig as QuotaConfig
from kvactors.settings.tables import SaltQuota as SaltQuota
from kvactors.settings.tables import StorageConfig as StorageConfig
