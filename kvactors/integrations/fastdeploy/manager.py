"""FastDeploy's `PrefixCacheManager`, as its V1 scheduler calls it.

FastDeploy cannot be installed where this package is tested: version 2 is not on PyPI. The manager
is written against the calls that FastDeploy's scheduler and engine make, and tested with a model of
that scheduler (tests/integrations/fastdeploy).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.errors import CacheClosed, ConfigError, DeadlineExceeded, KVActorsError, LayoutError
from kvactors.identity import CacheScope
from kvactors.integrations.fastdeploy.device_cache import (
    CallInFlight,
    DeviceCache,
    DirectStorage,
    IndexReports,
    PrefixMatch,
)
from kvactors.integrations.fastdeploy.engine_signals import (
    CLEARED,
    CLEARING,
    NORMAL,
    SIGNALS,
    UPDATING,
    EngineSignals,
)
from kvactors.integrations.fastdeploy.lower_tiers import EngineTensors, LowerTiers, open_lower_tiers
from kvactors.integrations.fastdeploy.metrics import HitRates, ManagerStatistics
from kvactors.integrations.fastdeploy.requests import (
    RequestRecord,
    block_ids,
    name_of,
    required_blocks,
    rounded_up,
    sequence_of,
    whole,
)
from kvactors.integrations.fastdeploy.settings import (
    CacheFields,
    FastDeployOptions,
    ManagerSettings,
    WeightsVersion,
    check_blocks,
    fields_of,
    read_settings,
)
from kvactors.layout.base import Layout
from kvactors.types import HASH_BYTES, split_hashes

log = get_logger()


class BlockManager(ABC):
    """Device blocks, prefix index and sinks of one FastDeploy engine.

    Every call is synchronous, and any thread may make it, with or without the engine's lock. Calls
    take turns in the order in which they come. One that waits for more seconds than any call may
    take raises DeadlineExceeded.

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
        self._line: list[SimpleQueue[None]] = []  # of the calls, the first one has the turn
        self._gauges = gauges
        self._cache = DeviceCache(self.num_gpu_blocks, settings.block_size)
        self._layout: Layout | None = None  # None: no block leaves the process
        self._weights = WeightsVersion(settings.model_path)
        self._unopened: tuple[str, ...] = ()  # why services are closed
        self._closed = False
        self._changed()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """A call, in line for the turn. Lists change in one step of the interpreter."""
        turn: SimpleQueue[None] = SimpleQueue()
        self._line.append(turn)
        try:
            try:
                if self._line[0] is not turn:
                    turn.get(timeout=self._turn_s)
            except Empty:
                raise DeadlineExceeded(
                    f"the calls before this one have not ended after {self._turn_s:g} s"
                ) from None
            try:
                yield
            finally:
                self._changed()
        finally:
            self._line.remove(turn)
            for first in self._line[:1]:  # it may have seen that it is the first one, or left
                first.put(None)

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
        ids = block_ids("gpu_block_ids", gpu_block_ids)
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
        writes = cache.lower.writes if isinstance(cache.lower, LowerTiers) else None
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
            self._cache.forget()  # running requests write to their blocks still
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

    @abstractmethod
    def _open_services(self) -> None:
        """Open what depends on the names of the weights of now."""

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
        """Open AttentionStore and the indexes. If one does not open, all stay closed until the next
        reset, and the cache works without them."""
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


class PrefixCacheManager(BlockManager):
    """Device blocks, prefix index, host memory and storage of one FastDeploy engine, for the
    schedulers that make FastDeploy's older calls. `write_cache_to_storage` takes no turn.

    Args:
        config: FastDeploy's `FDConfig`, or an object with the same attributes.
        tensors: the cache tensors of all ranks under FastDeploy's names (`cache_kvs_map`), or a
            function that returns them when the workers have made them. Needed with host memory,
            storage or indexes.
        stream: gives the handle of the GPU stream that copies come after.
        gauges: FastDeploy's `main_process_metrics`.
        environ: variables, the process's environment if None.

    Attributes:
        signals: shared with the engine's processes, None before the launch. They are also
            attributes under the names of FastDeploy's manager, such as `cache_ready_signal`.
    """

    def __init__(
        self,
        config: Any,
        tensor_parallel_size: int,
        splitwise_role: str = "mixed",
        local_data_parallel_id: int = 0,
        *,
        options: FastDeployOptions | Mapping[str, Any] | None = None,
        tensors: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
        stream: Callable[[], int | None] = lambda: None,
        gauges: Any = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        settings = read_settings(
            config, tensor_parallel_size, splitwise_role, local_data_parallel_id, options, environ
        )
        super().__init__(settings, gauges)
        self.signals: EngineSignals | None = None
        vars(self).update(dict.fromkeys(SIGNALS), cache_task_queue=None)
        self._named = tensors
        self._stream = stream
        self._tensors: EngineTensors | None = None

    # -- device blocks

    def can_allocate_gpu_blocks(self, num_blocks: float, try_free_gpu_blocks: bool = True) -> bool:
        """Whether so many device blocks, rounded up, are free, after an eviction if need be. If the
        answer is no, nothing was evicted. 0 and less are always free."""
        count = rounded_up("num_blocks", num_blocks)
        with self._turn():
            self._cache.settle()
            evicts = try_free_gpu_blocks and self.settings.cache.enable_prefix_caching
            return self._cache.make_room(count) if evicts else count <= len(self._cache.blocks.free)

    def allocate_gpu_blocks(self, num_blocks: int, req_id: str | None = None) -> list[int]:
        """Take the lowest free device blocks for a request, none for 0 and less. NoRoom if fewer
        are free: nothing changed."""
        count = max(0, whole("num_blocks", num_blocks))
        with self._turn():
            return self._cache.blocks.take(count, req_id)

    def free_block_ids(self, need_block_num: float) -> None:
        """Evict cached blocks that no request holds, at most as many as asked for. With a host tier
        their bytes are there when this returns."""
        count = rounded_up("need_block_num", need_block_num)
        with self._turn():
            self._cache.settle()
            self._cache.evict(count)

    get_required_block_num = staticmethod(required_blocks)

    # -- requests

    def request_match_blocks(
        self, task: Any, block_size: int, *args: Any
    ) -> tuple[list[int], int, dict[str, Any]]:
        """Match a request's tokens with the cache. Blocks of lower tiers are on the device when
        this returns. The request holds the blocks until `release_block_ids`, and
        `task.num_cached_blocks` counts them. Blocks of an earlier match are released first.

        Returns:
            Device blocks, the number of their tokens, and metrics.

        Raises:
            NoRoom: blocks in host memory do not fit on the device. Nothing is held: schedule the
                request again later.
            TypeError, ValueError: tokens or media are malformed, or the block size is another one.
                Nothing changed.
            ConfigError: the version of the weights cannot be read.
        """
        with self._turn():
            request, root = name_of(task), self._root()
            block_size = self._checked_size(block_size)
            record = RequestRecord(request, task, self._cache.tree, root)
            self._cache.release(request)
            caches = self.settings.cache.enable_prefix_caching  # else requests hold nothing
            found = self._cache.match(record) if caches else PrefixMatch()
            self._cache.open(record)
            tiers = (found.gpu, found.cpu, found.storage)
            gpu, cpu, storage = (len(one) * block_size for one in tiers)
            self.metrics.matched(gpu, cpu, storage, record.path.num_tokens)
            task.num_cached_blocks = record.num_cached
            blocks = record.blocks
            return blocks, len(blocks) * block_size, found.metrics(block_size)

    def update_cache_blocks(self, task: Any, block_size: int, num_computed_tokens: int) -> None:
        """Index the full blocks of a request's first `num_computed_tokens` tokens, which are
        computed, or will be before all work that is scheduled later. Sets `task.num_cached_blocks`.

        Raises:
            LookupError: the request was not matched. One of before a reset is no error.
            ValueError: the block table does not have the blocks, or the block size is another one.
                Nothing changed.
        """
        limit = whole("num_computed_tokens", num_computed_tokens)
        self._commit(task, block_size, lambda tokens: min(tokens, limit))

    def cache_output_blocks(self, task: Any, block_size: int) -> None:
        """Index the full blocks of a request and its output. See `update_cache_blocks`. The last
        token was not an input of the model, so a block that it fills is left out."""
        last = 1 if len(sequence_of(task, "output_token_ids")) else 0
        self._commit(task, block_size, lambda tokens: tokens - last)

    def _commit(self, task: Any, block_size: int, computed: Callable[[int], int]) -> None:
        """Index the full blocks of the tokens that `computed` gives of all tokens."""
        with self._turn():
            request = name_of(task)
            block_size = self._checked_size(block_size)
            self._cache.settle()
            record = self._cache.named(request)
            if record is None:
                log.warning("request of before a reset not cached", request=request)
                return
            full = computed(record.tokens_of(task)) // block_size
            if not self.settings.cache.enable_prefix_caching:
                full = 0
            table = sequence_of(task, "block_tables")
            own = self._cache.uncommitted(record, table, full)  # first: may refuse the call
            record.extend(task)
            self._cache.commit(record, own)
            task.num_cached_blocks = record.num_cached

    def _checked_size(self, block_size: int) -> int:
        size, expected = whole("block_size", block_size), self.settings.block_size
        if size != expected:
            raise ValueError(f"block_size is {expected} in the config, and {size} here")
        return size

    def release_block_ids(self, task: Any) -> None:
        """A request ends, is preempted or was not admitted: it holds its cached blocks no more.
        Nothing happens if it holds none."""
        with self._turn():
            self._cache.release(name_of(task))

    def write_cache_to_storage(self, request: Any) -> None:
        """A request has finished: save its cached blocks, and report them to indexes. Returns after
        the last write. Failures are logged and counted. To be called before `release_block_ids`."""
        request = name_of(request)
        record = self._cache.begin_write(request)
        if record is None:
            return
        late: Future[int] | None = None
        try:
            record.finished = True
            self._save(record)
        except (KVActorsError, TimeoutError) as error:
            log.error("request not written to storage", request=request, error=str(error))
            if isinstance(error, CallInFlight):
                late = error.answer  # the SDK may read the blocks before it returns
        finally:
            if late is None:
                record.writers.pop()
            else:
                late.add_done_callback(lambda _: record.writers.pop())

    def _save(self, record: RequestRecord) -> None:
        lower, direct, blocks = self._cache.lower, self._cache.direct, record.blocks
        if isinstance(lower, LowerTiers) and lower.writes is not None and blocks:
            keys = split_hashes(record.path.hashes(0, len(blocks)))
            lower.writes.write(keys, blocks, lambda: self._cache.holds(record))
        if direct is not None and blocks and not record.has_media:
            direct.save(record.path.tokens(0, len(blocks)), 0, blocks)

    # -- engine

    def launch_cache_manager(
        self,
        cache_config: Any,
        tensor_parallel_size: int,
        device_ids: Sequence[int],
        pod_ip: str,
        engine_worker_queue_port: int | str,
        ipc_suffix: Any,
        create_cache_tensor: bool,
    ) -> list[Any]:
        """Wait for the workers' tensors, and open host memory, storage and indexes. No process is
        started, so there is none to end.

        Args:
            pod_ip: not used: an address of FastDeploy's task queue.
            engine_worker_queue_port: the suffix of the engine's signals.
            ipc_suffix: not used: part of the names of tensors that processes attach.
            create_cache_tensor: must be false: the workers make the tensors.

        Raises:
            DeadlineExceeded: the workers' tensors are not there in time.
        """
        ranks = self.settings.ranks
        if self.signals is not None:
            raise ConfigError("the manager was launched already")
        if create_cache_tensor:
            raise ConfigError(
                "create_cache_tensor must be false: the workers make the tensors, and "
                "PrefixCacheManager is given them (tensors=)"
            )
        if tensor_parallel_size != ranks or len(device_ids) < ranks:
            raise ConfigError(
                f"tensor_parallel_size is {tensor_parallel_size} with {len(device_ids)} devices, "
                f"and was {ranks} in the constructor"
            )
        self.update_cache_config(cache_config)
        signals = EngineSignals(engine_worker_queue_port, ranks)
        try:
            ready = signals.named["cache_ready_signal"]
            ready.wait_for(ranks, self.settings.options.launch_timeout_s)
            self.attach()
        except BaseException:
            signals.close()
            raise
        signals.opened(swap_space=self.num_cpu_blocks > 0)
        self.signals = signals
        vars(self).update(signals.named)
        # the engine waits for a reset: a match then waits no longer for storage
        self._cache.interrupted = lambda: signals.status != NORMAL
        return []

    def attach(self) -> None:
        """Open host memory, storage and indexes over the tensors: the part of
        `launch_cache_manager` without signals, and with its errors."""
        with self._turn():
            self._open_tiers()

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        """Forget every block of device and host, and every request. Blocks that are written to
        storage are free when the writes have ended, which a reset does not wait for, whether
        `wait_for_tasks_done` or not. Stored objects stay, and are found again by requests of the
        same version of the weights."""
        with self._turn():
            self._reset()

    def serve_status(self) -> None:
        """Reset if `prefix_tree_status` asks for it, as FastDeploy does around an update of the
        weights. To be called in each step of the engine's scheduling loop."""
        signals = self.signals
        if signals is not None and (status := signals.status) in (CLEARING, UPDATING):
            self.reset()
            signals.status = CLEARED if status == CLEARING else NORMAL

    # -- the tiers below the device, AttentionStore, indexes

    def _open_tiers(self) -> None:
        settings, cache = self.settings, self._cache
        if self._closed:
            raise CacheClosed("the manager is closed")
        if self._tensors is not None or cache.lower is not None:
            raise ConfigError("the cache tensors are attached already")
        if len(cache.blocks.free) < cache.blocks.total:
            raise ConfigError(
                "blocks are in use: attach the cache tensors before the first request"
            )
        if not settings.needs_tensors:
            return
        named = self._named() if callable(self._named) else self._named
        if named is None:
            raise ConfigError(
                "host memory, storage and indexes need the cache tensors: give "
                "PrefixCacheManager tensors="
            )
        tensors = self._tensors = EngineTensors.read(named, settings)
        self._layout = tensors.layout
        try:
            lower = cache.lower = open_lower_tiers(settings, tensors, stream=self._stream)
            self._check_tensors(self.num_gpu_blocks)
            self._open_services()
            self.num_cpu_blocks = 0 if lower is None else lower.slots
        except BaseException:
            self._close_tiers()
            raise

    def _check_tensors(self, num_blocks: int) -> None:
        tensors = self._tensors
        if tensors is not None and num_blocks > tensors.num_blocks:
            raise LayoutError(
                f"total_block_num is {num_blocks}, and the cache tensors have "
                f"{tensors.num_blocks} blocks"
            )

    def _open_services(self) -> None:
        """Open AttentionStore and the indexes, under the names of the weights of now."""
        settings, cache, tensors = self.settings, self._cache, self._tensors
        config, limit = settings.config, settings.storage.open_timeout_s
        if tensors is None:
            return
        if settings.direct:
            from kvactors.attention_sdk import sdk_settings
            from kvactors.storage.attention_store import AttentionStoreBackend

            stores = []
            device: Any
            for rank in range(settings.ranks):
                device = tensors.device(rank)
                sdk = sdk_settings(config, tensors.layout, device, (rank, settings.ranks))
                stores.append(AttentionStoreBackend(sdk, device))
            store = DirectStorage(stores, settings.storage.timeout_s)
            store.thread.open(max(limit, sum(one.ready_timeout for one in stores)))
            cache.direct = store
        self._open_reports(tensors.layout, tensors.device(0))

    def _close_tiers(self) -> None:
        super()._close_tiers()
        self._tensors = self._layout = None

    def close(self) -> None:
        super().close()
        if self.signals is not None:
            self.signals.close()
