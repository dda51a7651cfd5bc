"""What FastDeploy's two cache managers have in common: blocks, turns, weights and indexes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.errors import DeadlineExceeded, KVActorsError
from kvactors.identity import CacheScope
from kvactors.integrations.fastdeploy.device_cache import DeviceCache, IndexReports
from kvactors.integrations.fastdeploy.metrics import HitRates, ManagerStatistics
from kvactors.integrations.fastdeploy.requests import whole
from kvactors.integrations.fastdeploy.settings import (
    CacheFields,
    ManagerSettings,
    WeightsVersion,
    check_blocks,
    fields_of,
)
from kvactors.layout.base import Layout
from kvactors.types import HASH_BYTES

log = get_logger()


class BlockManager:
    """Device blocks, prefix index and sinks of one FastDeploy engine.

    Every call is synchronous, and any thread may make it, with or without the engine's lock. Calls
    take turns: one that comes during another waits for it, or raises DeadlineExceeded after more
    seconds than any call may take.

    Args:
        gauges: FastDeploy's `main_process_metrics`.

    Attributes:
        settings: checked, for the weights of the last match.
    """

    def __init__(self, settings: ManagerSettings, gauges: Any) -> None:
        self.settings = settings
        self.num_gpu_blocks = settings.cache.total_block_num
        check_blocks(settings, self.num_gpu_blocks)
        self.num_cpu_blocks = settings.cache.num_cpu_blocks
        self.metrics = HitRates()
        storage = settings.storage
        services_s = storage.open_timeout_s + storage.close_timeout_s
        self._turn_s = settings.options.fetch_wait_s + 2 * storage.timeout_s + services_s
        self._next_turn: SimpleQueue[None] = SimpleQueue()
        self._next_turn.put(None)
        self._gauges = gauges
        self._cache = DeviceCache(self.num_gpu_blocks, settings.block_size)
        self._layout: Layout | None = None  # None: no block leaves the process
        self._weights = WeightsVersion(settings.model_path)
        self._unopened: tuple[str, ...] = ()  # why services are closed
        self._closed = False
        self._changed()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A call, which takes the turn and hands it over at its end."""
        try:
            self._next_turn.get(timeout=self._turn_s)
        except Empty:
            raise DeadlineExceeded(
                f"another call of the manager has not ended after {self._turn_s:g} s"
            ) from None
        try:
            yield
            self._changed()
        finally:
            self._next_turn.put(None)

    def _changed(self) -> None:
        if self._gauges is not None:
            for name, value in self.statistics().gauges().items():
                getattr(self._gauges, name).set(value)
        if self._cache.reports is not None:
            self._cache.reports.feed.flush()

    # -- device blocks

    @property
    def gpu_free_block_list(self) -> list[int]:
        """The free blocks. The first one is the lowest. Not to be changed."""
        return self._cache.blocks.free

    @property
    def available_gpu_resource(self) -> float:
        return len(self._cache.blocks.free) / self.num_gpu_blocks if self.num_gpu_blocks else 0.0

    def recycle_gpu_blocks(
        self, gpu_block_ids: int | Sequence[int], req_id: str | None = None
    ) -> None:
        """Return one or several blocks of `allocate_gpu_blocks` that `num_cached_blocks` does not
        count. ValueError if one is free already, in the prefix cache, or held for another request:
        nothing changed."""
        many = hasattr(gpu_block_ids, "__len__")
        given: Any = gpu_block_ids if many else [gpu_block_ids]
        ids = [whole("gpu_block_ids", block) for block in given]
        with self._turn():
            self._cache.blocks.give(ids, req_id)

    def update_cache_config(self, cache_config: Any) -> None:
        with self._turn():
            total = fields_of(cache_config, CacheFields, "cache_config").total_block_num
            check_blocks(self.settings, total)
            self._check_tensors(total)
            self._cache.resize(total)
            self.num_gpu_blocks = total

    def _check_tensors(self, num_blocks: int) -> None:
        """LayoutError if the cache tensors, as far as they are known, have fewer blocks."""

    def _reset(self) -> None:
        self._cache.reset()
        if self._unopened:
            self._open_again()
        self.metrics.reset_metrics()

    def statistics(self) -> ManagerStatistics:
        cache, rates = self._cache, self.metrics
        writes = None if cache.lower is None else cache.lower.writes
        return ManagerStatistics(
            gpu_blocks=cache.blocks.total,
            cpu_blocks=self.num_cpu_blocks,
            free_gpu_blocks=len(cache.blocks.free),
            evictable_gpu_blocks=cache.evictable,
            requests=len(cache.requests),
            gpu_tokens=rates.gpu_tokens,
            cpu_tokens=rates.cpu_tokens,
            storage_tokens=rates.storage_tokens,
            written_blocks=0 if writes is None else writes.written,
            failed_blocks=0 if writes is None else writes.failed,
            **rates.ratios(),
        )

    # -- weights

    def _root(self) -> bytes:
        """The hash that the chains of all requests start from. If the model's folder has other
        weights now, all that is cached is forgotten first. ConfigError if their version cannot be
        read: a request could be given stored blocks of other weights."""
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
        return bytes(HASH_BYTES) if self._layout is None else self._layout.fingerprint

    # -- AttentionStore and indexes

    def _open_services(self) -> None:
        """Open what depends on the names of the weights of now."""
        raise NotImplementedError

    def _open_reports(self, layout: Layout, device: Any) -> None:
        """Open the indexes of the settings. `device`: the device memory, None if it is in other
        processes."""
        settings, cache = self.settings, self._cache
        if not settings.config.flush.sinks:
            return
        from kvactors.flush_notifier.sinks import make_sinks

        sinks = make_sinks(settings.config, layout, device)
        total = cache.blocks.total + (0 if cache.lower is None else cache.lower.slots)
        reports = IndexReports(sinks, self._scope, self._fingerprint, settings.block_size, total)
        reports.thread.open(settings.storage.open_timeout_s)
        cache.reports = reports

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
        cache = self._cache
        lower = () if cache.lower is None else cache.lower.tiers.health().reasons
        direct = () if cache.direct is None else cache.direct.troubles
        reports = () if cache.reports is None else cache.reports.service.troubles
        return lower + direct + reports + self._unopened

    def _close_services(self) -> None:
        cache, limit = self._cache, self.settings.storage.close_timeout_s
        closing = cache.direct, cache.reports
        cache.direct = cache.reports = None
        for one in closing:
            if one is not None:
                one.thread.close(limit)

    def _close_tiers(self) -> None:
        lower, self._cache.lower = self._cache.lower, None
        self._close_services()
        if lower is not None:
            lower.close()

    def close(self) -> None:
        """Close storage and indexes and let go of the tensors, any number of times."""
        self._closed = True
        self._close_tiers()
