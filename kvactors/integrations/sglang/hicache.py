"""SGLang's entry point: the `HiCacheStorage` that SGLang loads by module path."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolTransferResult,
)
from sglang.srt.observability.metrics_collector import StorageMetrics

from kvactors.integrations.page_store import PageStore
from kvactors.integrations.sglang.pages import KV, HostPages, find_prefixes, leading
from kvactors.integrations.sglang.runtime import digest_of_models, replica_of
from kvactors.integrations.sglang.settings import (
    check_shared,
    read_settings,
    stored_share,
    tier_config,
)
from kvactors.tier_cache import open_storage

log = logging.getLogger("kvactors")

POLICIES = (PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES)


class KVActorsHiCache(HiCacheStorage):
    """kvactors' verified store below SGLang's host pool, with `HiCacheSettings`.

    The calls of SGLang's storage threads end within `storage.timeout_s` seconds and do not raise: a
    fault is a page that is not there."""

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any]) -> None:
        self.settings = read_settings(storage_config.extra_config)
        check_shared(self.settings.storage, storage_config)
        self._config = storage_config
        self._weights = digest_of_models()
        self._pages: dict[str, HostPages] = {}  # of the host pools
        self._stores: dict[str, PageStore] = {}
        self._share: float | None = None  # stored pages for each page of a host pool
        self._opened = self._closed = False
        self._metrics = StorageMetrics()
        self._last_fault = ""

    # -- host pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take SGLang's host pool of keys and values, and open its store. An error here lets SGLang
        attach another storage later, one of `on_host_pools_registered` does not.
        """
        super().register_mem_pool_host(mem_pool_host)
        self._pages[KV] = HostPages(KV, mem_pool_host)
        self._open(KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        known = self._pages.get(name)
        if known is not None and known.pool is host_pool:
            return
        self._pages[name] = HostPages(name, host_pool)
        if self._opened:
            self._open(name)

    def on_host_pools_registered(self) -> None:
        """Open the stores of the other pools. All pools share the capacity."""
        self._opened = True
        try:
            self._share = stored_share(self.settings.storage, self._pages)
            for name in self._pages:
                if self._share is not None:
                    self._open(name)
        except BaseException:
            self.close()
            raise

    def _open(self, name: str) -> None:
        pages = self._pages[name]
        earlier = self._stores.pop(name, None)
        if earlier is not None:
            earlier.close(self.settings.storage.close_timeout_s)
        config = tier_config(
            self.settings,
            self._config,
            pages.facts,
            page_bytes=pages.page_bytes,
            pages=None if self._share is None else max(1, int(self._share * pages.num_pages)),
            replica=replica_of(self._config.dp_rank),
            weights=self._weights,
        )
        tier = open_storage(config)
        self._stores[name] = PageStore(tier, pages.page_bytes, config.storage.timeout_s)
        log.info("pool %s: %d pages of %d bytes stored", name, tier.objects, pages.page_bytes)

    # -- SGLang's storage threads: pages of the pool of keys and values

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Pages from the start that can be read."""
        return self._guarded(lambda: leading(self._look_up(KV, keys)), 0)

    def batch_get_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Read pages into the host pool. Returns whether each was read, verified."""
        return self._move(KV, keys, host_indices, loads=True)

    def batch_set_v1(
        self, keys: list[str], host_indices: Any, extra_info: Any = None
    ) -> list[bool]:
        """Write pages from the host pool. Returns whether the store has each now."""
        return self._move(KV, keys, host_indices, loads=False)

    # -- the same for several pools

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        """The prefixes that can be restored from all pools together."""
        return self._guarded(
            lambda: self._prefixes(keys, pool_transfers or []), PoolTransferResult.empty()
        )

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._move_all(transfers, loads=True)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
        return self._move_all(transfers, loads=False)

    def _move_all(self, transfers: Any, *, loads: bool) -> dict[Any, list[bool]]:
        return {
            one.name: self._move(str(one.name), one.keys or [], one.host_indices, loads=loads)
            for one in transfers
        }

    def _prefixes(self, keys: Sequence[str], transfers: Sequence[Any]) -> PoolTransferResult:
        kv_pages = leading(self._look_up(KV, keys))
        # groups of blocks are another form of pages that the pool of keys and values has
        needed = [one for one in transfers if one.hit_policy in POLICIES]
        found = find_prefixes(kv_pages, [self._need(one, keys[:kv_pages]) for one in needed])
        hits = {KV: kv_pages} | {
            one.name: pages for one, pages in zip(needed, found.of_pools, strict=True)
        }
        return PoolTransferResult(
            found.longest, {name: pages for name, pages in hits.items() if pages}, found.restorable
        )

    def _need(self, transfer: Any, keys: Sequence[str]) -> tuple[list[bool], int]:
        """Whether a pool has each page, and the last pages of a prefix that it must have."""
        trailing = len(keys)
        if transfer.hit_policy != PoolHitPolicy.ALL_PAGES:
            trailing = max(1, len(transfer.keys or ()))
        return self._look_up(str(transfer.name), keys), trailing

    # -- calls that SGLang makes without `interface_v1`, which the settings refuse

    def get(self, *arguments: Any, **more: Any) -> Any:
        """SGLang would make a tensor of each page."""
        raise NotImplementedError("KVActorsHiCache needs interface_v1")

    exists = batch_get = set = batch_set = get

    # -- work

    def _guarded(self, work: Callable[[], Any], otherwise: Any) -> Any:
        """The answer of some work. An exception would end SGLang's thread: a new one is logged."""
        try:
            return work()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            if fault != self._last_fault and not self._closed:
                self._last_fault = fault
                log.error("a call of SGLang failed: %s", fault)
            return otherwise

    def _look_up(self, name: str, keys: Sequence[str]) -> list[bool]:
        store = self._stores[name]
        if store.tier.trouble:
            return [False] * len(keys)
        return store.look_up([bytes.fromhex(key) for key in keys])

    def _move(self, name: str, keys: Sequence[str], indices: Any, *, loads: bool) -> list[bool]:
        return self._guarded(
            lambda: self._measured(name, keys, indices, loads=loads), [False] * len(keys)
        )

    def _measured(self, name: str, keys: Sequence[str], indices: Any, *, loads: bool) -> list[bool]:
        store = self._stores[name]
        regions = self._pages[name].regions(indices, len(keys))
        begun = time.perf_counter()
        ok = (store.load if loads else store.save)([bytes.fromhex(key) for key in keys], regions)
        if ok and self._config.enable_storage_metrics:
            moved, metrics = sum(ok), self._metrics
            nbytes = moved * sum(region.nbytes for region in regions[0])
            speed = nbytes / 1e9 / max(1e-9, time.perf_counter() - begun)
            (metrics.prefetch_pgs if loads else metrics.backup_pgs).append(moved)
            (metrics.prefetch_bandwidth if loads else metrics.backup_bandwidth).append(speed)
        return ok

    # -- control

    def get_stats(self) -> StorageMetrics:
        """Pages and GB/s of each call since the last time, for SGLang's metrics."""
        metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def clear(self) -> bool:
        for store in self._stores.values():
            store.tier.clear()
        return True

    def close(self) -> None:
        """Close the stores. Later calls answer that there is nothing."""
        self._closed = True
        stores, self._stores = self._stores, {}
        for store in stores.values():
            store.close(self.settings.storage.close_timeout_s)
