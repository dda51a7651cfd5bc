"""kvactors: a tiered KV cache (device, host, storage) of independent asyncio actors that keeps
external indexes informed of the blocks on this node."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvactors.cache import Cleared as Cleared
    from kvactors.cache import KVCache as KVCache
    from kvactors.data_plane.ranks.worker import serve_rank as serve_rank
    from kvactors.decode_batch import Step as Step
    from kvactors.decode_batch import Stepped as Stepped
    from kvactors.errors import ActorFailed as ActorFailed
    from kvactors.errors import CacheAsleep as CacheAsleep
    from kvactors.errors import CacheClosed as CacheClosed
    from kvactors.errors import CacheFailed as CacheFailed
    from kvactors.errors import ConfigError as ConfigError
    from kvactors.errors import DeadlineExceeded as DeadlineExceeded
    from kvactors.errors import DeviceError as DeviceError
    from kvactors.errors import KVActorsError as KVActorsError
    from kvactors.errors import LayoutError as LayoutError
    from kvactors.errors import LeaseBusy as LeaseBusy
    from kvactors.errors import LeaseEnded as LeaseEnded
    from kvactors.errors import LeasesOpen as LeasesOpen
    from kvactors.errors import NeverFits as NeverFits
    from kvactors.errors import NoRoom as NoRoom
    from kvactors.errors import NotOpened as NotOpened
    from kvactors.errors import NotReady as NotReady
    from kvactors.errors import NumBlocksUnset as NumBlocksUnset
    from kvactors.errors import Paused as Paused
    from kvactors.errors import RankError as RankError
    from kvactors.errors import RankLost as RankLost
    from kvactors.errors import SinkError as SinkError
    from kvactors.errors import SleepUnsupported as SleepUnsupported
    from kvactors.errors import StoreError as StoreError
    from kvactors.errors import TokensCommitted as TokensCommitted
    from kvactors.errors import WrongLoop as WrongLoop
    from kvactors.errors import WrongThread as WrongThread
    from kvactors.hints import Hints as Hints
    from kvactors.layout.gqa import GQALayout as GQALayout
    from kvactors.lease import Hits as Hits
    from kvactors.lease import Lease as Lease
    from kvactors.lookup import FreeBlocks as FreeBlocks
    from kvactors.lookup import PromptHits as PromptHits
    from kvactors.observe.health import Health as Health
    from kvactors.observe.statistics import CacheStatistics as CacheStatistics
    from kvactors.opening import open as open  # noqa: A004
    from kvactors.settings import Config as Config
    from kvactors.tier_cache import TierCache as TierCache
    from kvactors.tier_cache import TierConfig as TierConfig
    from kvactors.tier_cache import open_tiers as open_tiers
    from kvactors.types import Reason as Reason
    from kvactors.types import Residency as Residency
    from kvactors.types import Tier as Tier
    from kvactors.types import Tokens as Tokens

NAMES = {
    "cache": "Cleared KVCache",
    "settings": "Config",
    "data_plane.ranks.worker": "serve_rank",
    "decode_batch": "Step Stepped",
    "errors": (
        "ActorFailed CacheAsleep CacheClosed CacheFailed ConfigError DeadlineExceeded "
        "DeviceError KVActorsError LayoutError LeaseBusy LeaseEnded LeasesOpen NeverFits "
        "NoRoom NotOpened NotReady NumBlocksUnset Paused RankError RankLost SinkError "
        "SleepUnsupported StoreError TokensCommitted WrongLoop WrongThread"
    ),
    "hints": "Hints",
    "layout.gqa": "GQALayout",
    "lease": "Hits Lease",
    "lookup": "FreeBlocks PromptHits",
    "observe.health": "Health",
    "observe.statistics": "CacheStatistics",
    "opening": "open",
    "tier_cache": "TierCache TierConfig open_tiers",
    "types": "Reason Residency Tier Tokens",
}
HOMES = {name: home for home, names in NAMES.items() for name in names.split()}
"""The module of each public name. It is imported when the name is first used, so that a plug-in in
an engine's process imports the parts that it needs."""

__all__ = sorted(HOMES)


def __getattr__(name: str) -> Any:
    full = f"{__name__}.{HOMES.get(name, name)}"
    try:
        found = import_module(full)
    except ModuleNotFoundError as error:
        if error.name != full:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    if name in HOMES:
        found = getattr(found, name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
