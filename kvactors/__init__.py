"""kvactors: a tiered KV cache (device, host, storage) of independent asyncio actors that keeps
external indexes informed of the blocks on this node."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvactors.cache import Cleared, KVCache
    from kvactors.cache import open_cache as open  # noqa: A004  (the public name is kvactors.open)
    from kvactors.data_plane.ranks.worker import serve_rank
    from kvactors.decode_batch import Step, Stepped
    from kvactors.errors import (
        ActorFailed,
        CacheAsleep,
        CacheClosed,
        CacheFailed,
        ConfigError,
        DeadlineExceeded,
        DeviceError,
        KVActorsError,
        LayoutError,
        LeaseBusy,
        LeaseEnded,
        LeasesOpen,
        NeverFits,
        NoRoom,
        NotReady,
        NumBlocksUnset,
        Paused,
        RankError,
        RankLost,
        SinkError,
        SleepUnsupported,
        StoreError,
        TokensCommitted,
        WrongLoop,
        WrongThread,
    )
    from kvactors.hints import Hints
    from kvactors.layout.gqa import GQALayout
    from kvactors.lease import Hits, Lease
    from kvactors.lookup import FreeBlocks, PromptHits
    from kvactors.observe.health import Health
    from kvactors.observe.statistics import CacheStatistics
    from kvactors.settings import Config
    from kvactors.tier_cache import TierCache, TierConfig, open_tiers
    from kvactors.types import Reason, Residency, Tier, Tokens

__all__ = [
    "ActorFailed",
    "CacheAsleep",
    "CacheClosed",
    "CacheFailed",
    "CacheStatistics",
    "Cleared",
    "Config",
    "ConfigError",
    "DeadlineExceeded",
    "DeviceError",
    "FreeBlocks",
    "GQALayout",
    "Health",
    "Hints",
    "Hits",
    "KVActorsError",
    "KVCache",
    "LayoutError",
    "Lease",
    "LeaseBusy",
    "LeaseEnded",
    "LeasesOpen",
    "NeverFits",
    "NoRoom",
    "NotReady",
    "NumBlocksUnset",
    "Paused",
    "PromptHits",
    "RankError",
    "RankLost",
    "Reason",
    "Residency",
    "SinkError",
    "SleepUnsupported",
    "Step",
    "Stepped",
    "StoreError",
    "Tier",
    "TierCache",
    "TierConfig",
    "Tokens",
    "TokensCommitted",
    "WrongLoop",
    "WrongThread",
    "open",
    "open_tiers",
    "serve_rank",
]

NAMES = {
    "cache": "Cleared KVCache open",
    "settings": "Config",
    "data_plane.ranks.worker": "serve_rank",
    "decode_batch": "Step Stepped",
    "errors": (
        "ActorFailed CacheAsleep CacheClosed CacheFailed ConfigError DeadlineExceeded "
        "DeviceError KVActorsError LayoutError LeaseBusy LeaseEnded LeasesOpen NeverFits "
        "NoRoom NotReady NumBlocksUnset Paused RankError RankLost SinkError SleepUnsupported "
        "StoreError TokensCommitted WrongLoop WrongThread"
    ),
    "hints": "Hints",
    "layout.gqa": "GQALayout",
    "lease": "Hits Lease",
    "lookup": "FreeBlocks PromptHits",
    "observe.health": "Health",
    "observe.statistics": "CacheStatistics",
    "tier_cache": "TierCache TierConfig open_tiers",
    "types": "Reason Residency Tier Tokens",
}
HOMES = {name: home for home, names in NAMES.items() for name in names.split()}
"""The module of each public name. It is imported when the name is first used, so that a plug-in in
an engine's process imports the parts that it needs."""


def __getattr__(name: str) -> Any:
    full = f"{__name__}.{HOMES.get(name, name)}"
    try:
        found = import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    if name in HOMES:
        found = getattr(found, "open_cache" if name == "open" else name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
