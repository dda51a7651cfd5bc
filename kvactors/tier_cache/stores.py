"""Storage tiers from settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvactors.errors import ConfigError
from kvactors.identity import StoreIdentity
from kvactors.tier_cache.settings import TierConfig, checked_config
from kvactors.tier_cache.storage_tier import StorageTier

if TYPE_CHECKING:
    from kvactors.storage.slot_store import SlotStore

OWN = {"write_policy", "min_hits", "slot_timeout", "open_timeout", "close_timeout"}
"""Settings of `TierStorage` that a back end does not need."""


def make_storage(
    config: TierConfig, *, event_fd: bool = False, clock: Callable[[], float] = time.monotonic
) -> StorageTier:
    """The storage tier of a config. `StorageTier.open` opens it.

    Raises:
        ConfigError: the config names no back end, or one that cannot be made.
    """
    storage = config.storage
    if storage.backend == "none":
        raise ConfigError("storage.backend is needed: file, memory, or package.module:Class")
    identity = StoreIdentity(
        config.model, storage.namespace, config.fingerprint, storage.rank, storage.ranks
    )

    def make() -> SlotStore:
        from kvactors.config_tables import StorageConfig
        from kvactors.storage.backends import make_backend

        fields = msgspec.structs.asdict(storage)
        settings = StorageConfig(
            **{name: value for name, value in fields.items() if name not in OWN}, keep_tokens=False
        )
        made = make_backend(settings, config.model, config.fingerprint, config.block_bytes)
        if made is None:
            raise ConfigError(f"storage.backend {storage.backend!r} makes no store")
        return made

    return StorageTier(
        make, identity.digest, config.block_bytes, storage.timeout, event_fd=event_fd, clock=clock
    )


def open_storage(config: TierConfig | Mapping[str, Any], *, event_fd: bool = False) -> StorageTier:
    """Open storage for an engine that has host memory and its bookkeeping already.

    Args:
        config: settings. `num_slots`, `policy`, `events` and `storage.write_policy` are not used.
        event_fd: whether `StorageTier.fd` becomes readable when there are results.

    Raises:
        ConfigError: a setting is unknown, malformed or out of range.
        StoreError: the store cannot be used (an OSError).
    """
    checked = checked_config(config)
    tier = make_storage(checked, event_fd=event_fd)
    tier.open(checked.storage.open_timeout)
    return tier
