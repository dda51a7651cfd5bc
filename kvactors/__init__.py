"""kvactors: independent asyncio actors that keep a tiered KV cache and tell external indexes what
this node holds."""

from kvactors.cache import KVCache
from kvactors.cache import open_cache as open  # noqa: A004  (kvactors.open reads as what it is)
from kvactors.config import Config
from kvactors.data_plane.ranks.worker import serve_rank
from kvactors.errors import (
    ActorFailed,
    CacheClosed,
    CacheFailed,
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    KVActorsError,
    LayoutError,
    LeaseBusy,
    LeaseEnded,
    NoRoom,
    NotReady,
    Paused,
    RankError,
    RankLost,
    SinkError,
    StoreError,
    WrongLoop,
)
from kvactors.layout.gqa import GQALayout
from kvactors.lease import Hits, Lease
from kvactors.observe.health import Health
from kvactors.observe.statistics import CacheStatistics
from kvactors.types import Reason, Residency, Tier, Tokens

__all__ = [
    "ActorFailed",
    "CacheClosed",
    "CacheFailed",
    "CacheStatistics",
    "Config",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceError",
    "GQALayout",
    "Health",
    "Hits",
    "KVActorsError",
    "KVCache",
    "LayoutError",
    "Lease",
    "LeaseBusy",
    "LeaseEnded",
    "NoRoom",
    "NotReady",
    "Paused",
    "RankError",
    "RankLost",
    "Reason",
    "Residency",
    "SinkError",
    "StoreError",
    "Tier",
    "Tokens",
    "WrongLoop",
    "open",
    "serve_rank",
]
