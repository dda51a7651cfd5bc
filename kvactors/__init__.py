"""kvactors: a tiered KV cache (device, host, storage) of independent asyncio actors that keeps
external indexes informed of the blocks on this node."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvactors.cache import KVCache
    from kvactors.cache import open_cache as open  # noqa: A004  (the public name is kvactors.open)
    from kvactors.data_plane.ranks.worker import serve_rank
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
    from kvactors.scenario.recording import record
    from kvactors.settings import Config
    from kvactors.steps import Step, Stepped
    from kvactors.tenants import Cleared
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
    "record",
    "serve_rank",
]

HOMES = {
    "ActorFailed": "kvactors.errors",
    "CacheAsleep": "kvactors.errors",
    "CacheClosed": "kvactors.errors",
    "CacheFailed": "kvactors.errors",
    "CacheStatistics": "kvactors.observe.statistics",
    "Cleared": "kvactors.tenants",
    "Config": "kvactors.settings",
    "ConfigError": "kvactors.errors",
    "DeadlineExceeded": "kvactors.errors",
    "DeviceError": "kvactors.errors",
    "FreeBlocks": "kvactors.lookup",
    "GQALayout": "kvactors.layout.gqa",
    "Health": "kvactors.observe.health",
    "Hints": "kvactors.hints",
    "Hits": "kvactors.lease",
    "KVActorsError": "kvactors.errors",
    "KVCache": "kvactors.cache",
    "LayoutError": "kvactors.errors",
    "Lease": "kvactors.lease",
    "LeaseBusy": "kvactors.errors",
    "LeasesOpen": "kvactors.errors",
    "LeaseEnded": "kvactors.errors",
    "NeverFits": "kvactors.errors",
    "NoRoom": "kvactors.errors",
    "NotReady": "kvactors.errors",
    "NumBlocksUnset": "kvactors.errors",
    "Paused": "kvactors.errors",
    "PromptHits": "kvactors.lookup",
    "RankError": "kvactors.errors",
    "RankLost": "kvactors.errors",
    "Reason": "kvactors.types",
    "Residency": "kvactors.types",
    "SinkError": "kvactors.errors",
    "Step": "kvactors.steps",
    "Stepped": "kvactors.steps",
    "SleepUnsupported": "kvactors.errors",
    "StoreError": "kvactors.errors",
    "Tier": "kvactors.types",
    "TierCache": "kvactors.tier_cache",
    "TierConfig": "kvactors.tier_cache",
    "Tokens": "kvactors.types",
    "TokensCommitted": "kvactors.errors",
    "WrongLoop": "kvactors.errors",
    "WrongThread": "kvactors.errors",
    "open": "kvactors.cache",
    "open_tiers": "kvactors.tier_cache",
    "record": "kvactors.scenario.recording",
    "serve_rank": "kvactors.data_plane.ranks.worker",
}
"""The module of each public name. It is imported when the name is first used, so that a plug-in in
an engine's process imports the parts that it needs."""


def __getattr__(name: str) -> Any:
    if name in HOMES:
        home = import_module(HOMES[name])
        found = getattr(home, "open_cache" if name == "open" else name)
    else:
        found = _submodule(name)
    globals()[name] = found
    return found


def _submodule(name: str) -> Any:
    full = f"{__name__}.{name}"
    try:
        return import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
