"""Settings that `adapter_params` holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvactors.errors import ConfigError
from kvactors.integrations.engine import FileStoreSettings
from kvactors.settings.check import convert, in_bytes, located
from kvactors.tier_cache import TierConfig
from kvactors.tier_cache.settings import checked_config

WHERE = "adapter_params"
MODEL = "lmcache"  # of the store: the models of LMCache's objects are in their keys
LEAST_PAGE = 4096


class L2Settings(FileStoreSettings, frozen=True, kw_only=True):
    """The keys of `adapter_params`. Sizes may be written "4GB"."""

    capacity_bytes: int | str
    page_bytes: int | str = "1MB"
    staging_bytes: int | str = "64MB"
    open_timeout_s: float = 60.0
    close_timeout_s: float = 5.0

    @property
    def page(self) -> int:
        return in_bytes(self.page_bytes, "page_bytes")

    @property
    def pages(self) -> int:
        return in_bytes(self.capacity_bytes, "capacity_bytes") // self.page


def read_settings(adapter_params: Mapping[str, Any]) -> L2Settings:
    """Check `adapter_params`."""
    with located(WHERE):
        settings = convert(adapter_params, L2Settings)
        if settings.page < LEAST_PAGE or settings.page % LEAST_PAGE:
            raise ConfigError(f"page_bytes must be a multiple of {LEAST_PAGE}, not {settings.page}")
        for name, pages in (("capacity_bytes", 1), ("staging_bytes", 2)):
            size = getattr(settings, name)
            if in_bytes(size, name) < pages * settings.page:
                raise ConfigError(f"{name} must be at least {pages} x page_bytes, not {size!r}")
    return settings


def store_config(settings: L2Settings) -> TierConfig:
    """The config of the store."""
    with located(WHERE):
        storage = settings.storage(capacity_blocks=settings.pages, capacity_bytes=None)
    return checked_config(
        TierConfig(
            model=MODEL,
            block_bytes=settings.page,
            num_slots=1,
            identity={"engine": "lmcache"},
            storage=storage,
        )
    )
