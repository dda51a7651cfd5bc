"""The settings of quotas: checks, and sizes in blocks."""

from __future__ import annotations

from kvactors.config_tables import QuotaConfig
from kvactors.errors import ConfigError
from kvactors.quotas import Quota, Quotas
from kvactors.sizes import in_blocks


def check_quota(config: QuotaConfig) -> None:
    """Raise ConfigError for a quota that no tier can keep."""
    if config.storage is not None:
        raise ConfigError(
            "quota.storage is not kept yet: a store finds blocks by their hashes, and a salt is "
            "not written to it. Bound the whole store by storage.capacity_bytes, or use a store "
            "for each tenant"
        )
    for salt in config.salts:
        if any("\ud800" <= letter <= "\udfff" for letter in salt):
            raise ConfigError("quota.salts has a surrogate that UTF-8 cannot encode")


def quota_in_blocks(
    name: str, device: int | str | None, host: int | str | None, block_bytes: int
) -> Quota:
    """A quota in blocks. ConfigError for a size that holds no block."""
    return Quota(
        *(
            None if size is None else in_blocks(size, f"{name}.{tier}", block_bytes)
            for tier, size in (("device", device), ("host", host))
        )
    )


def quotas_of(config: QuotaConfig, block_bytes: int) -> Quotas:
    """The quotas of the settings. block_bytes: of a block. ConfigError names the wrong one."""
    named = {
        salt: quota_in_blocks(f"quota.salts.{salt}", quota.device, quota.host, block_bytes)
        for salt, quota in config.salts.items()
    }
    return Quotas(quota_in_blocks("quota", config.device, config.host, block_bytes), named)
