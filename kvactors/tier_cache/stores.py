"""Storage tiers from settings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from kvactors.errors import ConfigError
from kvactors.identity import StoreIdentity
from kvactors.tier_cache.settings import TierConfig, checked_config
from kvactors.tier_cache.storage_tier import StorageTier

if TYPE_CHECKING:
    from kvactors.mooncake_config import MooncakeConfig
    from kvactors.storage.slot_store import SlotStore
    from kvactors.tier_cache.slot_memory import SlotMemory

OWN = {
    "write_policy",
    "min_hits",
    "on_full",
    "on_full_wait_s",
    "slot_timeout_s",
    "open_timeout_s",
    "close_timeout_s",
}
"""Settings of `TierStorage` that a back end does not need."""


def make_storage(
    config: TierConfig,
    *,
    event_fd: bool = False,
    memory: SlotMemory | None = None,
    clock: Callable[[], float] = time.monotonic,
    environ: Mapping[str, str] | None = None,
) -> StorageTier:
    """The storage tier of a config. `StorageTier.open` opens it.

    Args:
        config: checked settings.
        event_fd: see `open_storage`.
        memory: the host slots, which a pool over RDMA registers.
        clock: of time-outs, in seconds.
        environ: variables that complete the settings of a pool, the process's if None.

    Raises:
        ConfigError: the config names no back end, or one that cannot be made.
    """
    storage = config.storage
    if storage.backend == "none":
        raise ConfigError("storage.backend is needed: file, memory, or package.module:Class")
    identity = StoreIdentity(
        config.model, storage.namespace, config.fingerprint, storage.rank, storage.ranks
    )

    variables = os.environ if environ is None else environ
    is_pool = storage.backend == "mooncake"
    if is_pool:
        _mooncake(
            storage.mooncake, variables
        )  # a wrong setting is found here, not in the store's thread

    def make() -> SlotStore:
        from kvactors.config_tables import StorageConfig
        from kvactors.mooncake_config import MooncakeConfig
        from kvactors.storage.backends import make_backend

        fields = msgspec.structs.asdict(storage)
        fields["mooncake"] = _mooncake(storage.mooncake, variables) if is_pool else MooncakeConfig()
        settings = StorageConfig(
            **{name: value for name, value in fields.items() if name not in OWN}, keep_tokens=False
        )
        made = make_backend(settings, config.model, config.fingerprint, config.block_bytes)
        if made is None:
            raise ConfigError(f"storage.backend {storage.backend!r} makes no store")
        return made

    return StorageTier(
        make,
        identity.digest,
        config.block_bytes,
        storage.timeout_s,
        event_fd=event_fd,
        memory=memory if is_pool else None,
        clock=clock,
    )


def _mooncake(table: Mapping[str, Any], environ: Mapping[str, str]) -> MooncakeConfig:
    """Settings of a pool, completed from MOONCAKE_CONFIG_PATH and MOONCAKE_* variables.

    Raises:
        ConfigError: one is unknown, malformed or missing.
    """
    from kvactors.mooncake_config import MooncakeConfig, resolve

    try:
        config = msgspec.convert(table, MooncakeConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"storage.mooncake: {error}") from error
    found = resolve(config, environ)
    found.check()
    return found


def whole(memory: Any) -> SlotMemory:
    """All of an engine's memory as one slot."""
    from kvactors.tier_cache.slot_memory import SlotMemory

    return SlotMemory(1, memoryview(memory).nbytes, memory)


def open_storage(
    config: TierConfig | Mapping[str, Any], *, event_fd: bool = False, memory: Any = None
) -> StorageTier:
    """Open storage for an engine that has host memory and its bookkeeping already.

    Args:
        config: settings. `num_slots`, `policy`, `events` and `storage.write_policy` are not used.
        event_fd: whether `StorageTier.fd` becomes readable when there are results.
        memory: the engine's memory that the views of all jobs are in. A Mooncake pool over RDMA
            registers it.

    Raises:
        ConfigError: a setting is unknown, malformed or out of range.
        StoreError: the store cannot be used (an OSError).
    """
    checked = checked_config(config)
    known = None if memory is None else whole(memory)
    tier = make_storage(checked, event_fd=event_fd, memory=known)
    tier.open(checked.storage.open_timeout_s)
    return tier
