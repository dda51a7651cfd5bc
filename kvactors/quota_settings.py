"""The settings of quotas: checks, and sizes in blocks."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors.config_tables import QuotaConfig, SaltQuota, StorageConfig
from kvactors.errors import ConfigError
from kvactors.quotas import Quota, Quotas
from kvactors.sizes import in_blocks


def check_quota(config: QuotaConfig, storage: StorageConfig, ranks: int) -> None:
    """Raise ConfigError for a quota that no tier can keep."""
    reason = no_storage_quota(storage, ranks)
    if reason and has_storage_quota(config):
        raise ConfigError(reason)
    for salt in config.salts:
        if any("\ud800" <= letter <= "\udfff" for letter in salt):
            raise ConfigError("quota.salts has a surrogate that UTF-8 cannot encode")


def has_storage_quota(config: QuotaConfig) -> bool:
    """Whether there is a quota of the store."""
    salts = config.salts.values()
    return config.storage is not None or any(one.storage is not None for one in salts)


def no_storage_quota(storage: StorageConfig, ranks: int) -> str:
    """Why a store cannot keep quotas of salts. Empty if it can, as far as the settings tell."""
    if storage.backend in ("mooncake", "attention_store"):
        return (
            f"quota.storage needs a store whose space this process manages: {storage.backend} "
            "evicts its objects itself, for all its nodes together. Use storage.backend = 'file', "
            "or a pool for each tenant"
        )
    if storage.read_only:
        return (
            "quota.storage is kept by the process that writes the store: set it there, or leave "
            "out storage.read_only"
        )
    if ranks > 1:
        return (
            f"quota.storage needs one rank, not {ranks}: ranks evict from separate stores. "
            "Bound the stores by storage.capacity_bytes"
        )
    return ""


def quota_in_blocks(
    name: str, sizes: Sequence[int | str | None], block_bytes: int, object_bytes: int
) -> Quota:
    """A quota in blocks. ConfigError for a size that holds no block.

    Args:
        name: of the quota, for the error.
        sizes: of device, host and storage.
        block_bytes: of a block in memory.
        object_bytes: of a block in the store.
    """
    each = (block_bytes, block_bytes, object_bytes)
    return Quota(
        *(
            None if size is None else in_blocks(size, f"{name}.{tier}", nbytes)
            for tier, size, nbytes in zip(Quota._fields, sizes, each, strict=True)
        )
    )


def quotas_of(config: QuotaConfig, block_bytes: int, object_bytes: int) -> Quotas:
    """The quotas of the settings. ConfigError names the wrong one.

    Args:
        config: the settings.
        block_bytes: of a block in memory.
        object_bytes: of a block in the store.
    """

    def quota(name: str, one: QuotaConfig | SaltQuota) -> Quota:
        sizes = (one.device, one.host, one.storage)
        return quota_in_blocks(name, sizes, block_bytes, object_bytes)

    named = {salt: quota(f"quota.salts.{salt}", one) for salt, one in config.salts.items()}
    return Quotas(quota("quota", config), named)
