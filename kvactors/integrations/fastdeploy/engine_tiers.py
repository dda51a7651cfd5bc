"""Opens and closes everything below one manager's device blocks: tiers, AttentionStore, indexes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.errors import CacheClosed, ConfigError, KVActorsError, LayoutError
from kvactors.identity import CacheScope
from kvactors.integrations.fastdeploy.device_cache import DeviceCache, DirectStorage, IndexReports
from kvactors.integrations.fastdeploy.lower_tiers import (
    EngineTensors,
    needs_tensors,
    open_lower_tiers,
)
from kvactors.integrations.fastdeploy.settings import ManagerSettings, WeightsVersion

log = get_logger()

NO_TENSORS = b"kvactors.fastdeploy.v1"
"""The layout's fingerprint, with the block size, of a manager that has no tensors."""

NamedTensors = Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None


class EngineTiers:
    """The tiers of one manager.

    Args:
        cache: the device's blocks. The tiers are set there when they are open.

    Attributes:
        settings: for the weights of the last match.
    """

    def __init__(
        self,
        settings: ManagerSettings,
        cache: DeviceCache,
        named: NamedTensors,
        stream: Callable[[], int | None],
    ) -> None:
        self.settings = settings
        self._cache = cache
        self._named = named
        self._stream = stream
        self._tensors: EngineTensors | None = None
        self._weights = WeightsVersion(settings.model_path)
        self._unopened: tuple[str, ...] = ()  # why AttentionStore or the indexes are closed
        self._closed = False

    def root(self) -> bytes:
        """The hash that the chains of all requests start from. If the model's folder has other
        weights now, all that is cached is forgotten first.

        Raises:
            ConfigError: the version of the weights cannot be read. A request could be given stored
                blocks of other weights.
        """
        version = self._weights.now()
        if version != self.settings.config.cache.namespace:
            self._cache.reset()
            self._close_services()
            self.settings = self.settings.of_version(version)
            self._open_again()
        return self._scope.root(self._fingerprint)

    @property
    def _scope(self) -> CacheScope:
        cache = self.settings.config.cache
        return CacheScope(cache.model, cache.namespace)

    @property
    def _fingerprint(self) -> bytes:
        if self._tensors is not None:
            return self._tensors.layout.fingerprint
        text = NO_TENSORS + self.settings.block_size.to_bytes(4, "little")
        return hashlib.sha256(text).digest()

    def attach(self, num_blocks: int) -> None:
        """Open everything over the tensors."""
        if self._closed:
            raise CacheClosed("the manager is closed")
        settings, cache = self.settings, self._cache
        if self._tensors is not None or cache.lower is not None:
            raise ConfigError("the cache tensors are attached already")
        if cache.blocks.held or cache.blocks.indexed:
            raise ConfigError(
                "blocks are in use: attach the cache tensors before the first request"
            )
        if not needs_tensors(settings) and not settings.config.flush.sinks:
            return
        named = self._named() if callable(self._named) else self._named
        if named is None:
            raise ConfigError(
                "host memory, storage and indexes need the cache tensors: give "
                "PrefixCacheManager tensors="
            )
        tensors = EngineTensors.read(named, settings)
        self._tensors = tensors
        try:
            cache.lower = open_lower_tiers(settings, tensors, stream=self._stream)
            self.check_blocks(num_blocks)
            self._open_services()
        except BaseException:
            self._close_all()
            raise

    def check_blocks(self, num_blocks: int) -> None:
        """Check a number of device blocks."""
        tensors = self._tensors
        if tensors is not None and num_blocks > tensors.num_blocks:
            raise LayoutError(
                f"total_block_num is {num_blocks}, and the cache tensors have "
                f"{tensors.num_blocks} blocks"
            )

    def _open_services(self) -> None:
        """Open AttentionStore and the indexes, under the names of the weights of now."""
        settings, cache, tensors = self.settings, self._cache, self._tensors
        config = settings.config
        direct = settings.backend == "attention_store" and not settings.flush_only
        if tensors is None or not (direct or config.flush.sinks):
            return
        from kvactors.attention_sdk import sdk_settings
        from kvactors.flush_notifier.sinks import make_sinks

        device: Any = tensors.device(0)
        limit = settings.storage.open_timeout_s
        if direct:
            from kvactors.storage.attention_store import AttentionStoreBackend

            stores = []
            for rank in range(settings.ranks):
                part: Any = tensors.device(rank)
                sdk = sdk_settings(config, tensors.layout, part, (rank, settings.ranks))
                stores.append(AttentionStoreBackend(sdk, part))
            store = DirectStorage(stores, settings.storage.timeout_s)
            store.open(limit)
            cache.direct = store
        sinks = make_sinks(config, tensors.layout, device)
        if sinks:
            slots = 0 if cache.lower is None else cache.lower.slots
            total = cache.blocks.total + slots
            reports = IndexReports(
                sinks, self._scope, self._fingerprint, settings.block_size, total
            )
            reports.open(limit)
            cache.reports = reports

    def reset(self) -> None:
        """Forget every block of device and host, and every request, and open what did not open."""
        self._cache.reset()
        if self._unopened:
            self._open_again()

    def _open_again(self) -> None:
        """Open AttentionStore and the indexes. The others work without those that do not open."""
        self._unopened = ()
        try:
            self._open_services()
        except KVActorsError as error:
            log.error("AttentionStore and indexes not opened", error=str(error))
            self._close_services()
            self._unopened = (f"AttentionStore and indexes are closed: {error}",)

    @property
    def troubles(self) -> tuple[str, ...]:
        """The parts that do not work, with reasons."""
        cache = self._cache
        lower = () if cache.lower is None else cache.lower.host.tiers.health().reasons
        direct = () if cache.direct is None else cache.direct.troubles
        reports = () if cache.reports is None else cache.reports.troubles
        return lower + direct + reports + self._unopened

    def _close_services(self) -> None:
        cache, limit = self._cache, self.settings.storage.close_timeout_s
        direct, cache.direct = cache.direct, None
        reports, cache.reports = cache.reports, None
        if direct is not None:
            direct.close(limit)
        if reports is not None:
            reports.close(limit)

    def _close_all(self) -> None:
        lower, self._cache.lower = self._cache.lower, None
        self._close_services()
        if lower is not None:
            lower.close()
        self._tensors = None

    def close(self) -> None:
        """Close everything, any number of times."""
        self._closed = True
        self._close_all()
