"""FastDeploy's `PrefixCacheManager`, as its V1 scheduler calls it.

FastDeploy cannot be installed where this package is tested: version 2 is not on PyPI. The manager
is written against the calls that FastDeploy's scheduler and engine make, and tested with a model of
that scheduler (tests/integrations/fastdeploy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from kvactors.actor.log import get_logger
from kvactors.errors import CacheClosed, ConfigError, KVActorsError, LayoutError
from kvactors.integrations.fastdeploy.base import BlockManager
from kvactors.integrations.fastdeploy.device_cache import CallInFlight, DirectStorage, PrefixMatch
from kvactors.integrations.fastdeploy.engine_signals import (
    CLEARED,
    CLEARING,
    NORMAL,
    SIGNALS,
    UPDATING,
    EngineSignals,
)
from kvactors.integrations.fastdeploy.lower_tiers import EngineTensors, open_lower_tiers
from kvactors.integrations.fastdeploy.requests import (
    RequestRecord,
    name_of,
    required_blocks,
    rounded_up,
    sequence_of,
    whole,
)
from kvactors.integrations.fastdeploy.settings import FastDeployOptions, read_settings
from kvactors.types import split_hashes

log = get_logger()


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
        if lower is not None and lower.writes is not None and blocks:
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
