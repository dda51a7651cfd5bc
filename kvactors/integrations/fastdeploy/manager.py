"""FastDeploy's `PrefixCacheManager`, as its V1 scheduler calls it.

FastDeploy cannot be installed where this package is tested: version 2 is not on PyPI. The manager
is written against the calls that FastDeploy's scheduler and engine make, and tested with a model of
that scheduler (tests/integrations/fastdeploy).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvactors.integrations.fastdeploy.arguments import (
    name_of,
    required_blocks,
    rounded_up,
    sequence_of,
    whole,
)
from kvactors.integrations.fastdeploy.device_blocks import FreeBlockList
from kvactors.integrations.fastdeploy.device_cache import DeviceCache
from kvactors.integrations.fastdeploy.engine_signals import (
    EngineSignals,
    check_launch,
    launch,
    status_served,
)
from kvactors.integrations.fastdeploy.engine_tiers import EngineTiers, NamedTensors
from kvactors.integrations.fastdeploy.hit_rates import HitRates
from kvactors.integrations.fastdeploy.request_calls import RequestCalls
from kvactors.integrations.fastdeploy.settings import (
    FastDeployOptions,
    ManagerSettings,
    check_blocks,
    read_settings,
    total_blocks,
)
from kvactors.integrations.fastdeploy.statistics import (
    EngineGauges,
    ManagerStatistics,
    statistics_of,
)
from kvactors.integrations.fastdeploy.turns import Turns


class PrefixCacheManager:
    """Device blocks, prefix index, host memory and storage of one FastDeploy engine.

    Every call is synchronous. The engine's lock is held in all calls but `write_cache_to_storage`,
    which any thread may make at any time. Calls that overlap raise WrongThread.

    Args:
        config: FastDeploy's `FDConfig`, or an object with the same attributes.
        tensor_parallel_size: ranks.
        splitwise_role: "mixed".
        local_data_parallel_id: of this engine on its node.
        options: settings that FastDeploy has no flag for.
        tensors: the cache tensors of all ranks under FastDeploy's names (`cache_kvs_map`), or a
            function that returns them when the workers have made them. Needed with host memory,
            storage or indexes.
        stream: gives the handle of the GPU stream that copies come after.
        gauges: FastDeploy's `main_process_metrics`.
        environ: variables, the process's environment if None.

    Attributes:
        num_gpu_blocks, num_cpu_blocks: blocks of the device and of the host tier.
        metrics: hit rates.
        signals: shared with the engine's processes, None before the launch.

    Raises:
        ConfigError: names a field, variable or option that is malformed or not supported.
    """

    def __init__(
        self,
        config: Any,
        tensor_parallel_size: int,
        splitwise_role: str = "mixed",
        local_data_parallel_id: int = 0,
        *,
        options: FastDeployOptions | Mapping[str, Any] | None = None,
        tensors: NamedTensors = None,
        stream: Callable[[], int | None] = lambda: None,
        gauges: Any = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        role, replica = splitwise_role, local_data_parallel_id
        settings = read_settings(config, tensor_parallel_size, role, replica, options, environ)
        self.config, self.cache_config = config, config.cache_config
        self.tensor_parallel_size = tensor_parallel_size
        self.splitwise_role, self.enable_splitwise, self.local_data_parallel_id = role, 0, replica
        self.num_gpu_blocks = total_blocks(self.cache_config)
        check_blocks(settings, self.num_gpu_blocks)
        self.num_cpu_blocks = settings.host_blocks
        self.kvcache_storage_backend = self.cache_config.kvcache_storage_backend
        self.write_policy = "write_through"
        self.metrics = HitRates()
        self.signals: EngineSignals | None = None
        self._turns = Turns()
        self._gauges = EngineGauges(gauges)
        self._cache = DeviceCache(self.num_gpu_blocks)
        self._tiers = EngineTiers(settings, self._cache, tensors, stream)
        self._calls = RequestCalls(self._cache, self._tiers, self.metrics)
        self._changed()

    @property
    def settings(self) -> ManagerSettings:
        """The checked settings."""
        return self._tiers.settings

    def _changed(self) -> None:
        """A call ends that may have changed blocks."""
        cache = self._cache
        self._gauges.sized(self.num_gpu_blocks, self.num_cpu_blocks)
        self._gauges.moved(cache.blocks.free, cache.index.unreferenced, self.num_gpu_blocks)
        if cache.reports is not None:
            cache.reports.flush()

    # -- device blocks

    @property
    def gpu_free_block_list(self) -> FreeBlockList:
        """The free device blocks, the lowest one first."""
        return self._cache.blocks.free_list

    @property
    def available_gpu_resource(self) -> float:
        """Free device blocks, of all."""
        return self._cache.blocks.free / self.num_gpu_blocks if self.num_gpu_blocks else 0.0

    def can_allocate_gpu_blocks(self, num_blocks: float, try_free_gpu_blocks: bool = True) -> bool:
        """Whether as many device blocks are free, after an eviction if need be. If the answer is
        no, nothing was evicted.

        Args:
            num_blocks: rounded up. 0 and less are always free.
            try_free_gpu_blocks: whether blocks may be evicted.

        Raises:
            DeviceError: a copy to host memory does not end.
        """
        count = rounded_up("num_blocks", num_blocks)
        with self._turns:
            self._cache.settle()
            evicts = try_free_gpu_blocks and self.settings.prefix_caching
            found = self._cache.make_room(count) if evicts else count <= self._cache.blocks.free
            self._changed()
            return found

    def allocate_gpu_blocks(self, num_blocks: int, req_id: str | None = None) -> list[int]:
        """Take free device blocks, the lowest ones, for a request. None for 0 and less.

        Raises:
            NoRoom: fewer are free. Nothing changed.
        """
        count = max(0, whole("num_blocks", num_blocks))
        with self._turns:
            found = self._cache.blocks.take(count, req_id)
            self._changed()
            return found

    def recycle_gpu_blocks(
        self, gpu_block_ids: int | Sequence[int], req_id: str | None = None
    ) -> None:
        """Return blocks of `allocate_gpu_blocks` that `num_cached_blocks` does not count: one, or
        several.

        Raises:
            ValueError: a block is free already, in the prefix cache, or held for another request.
                Nothing changed.
        """
        many = hasattr(gpu_block_ids, "__len__")
        given: Any = gpu_block_ids if many else [gpu_block_ids]
        ids = [whole("gpu_block_ids", block) for block in given]
        with self._turns:
            self._cache.blocks.give(ids, req_id)
            self._changed()

    def free_block_ids(self, need_block_num: float) -> None:
        """Evict cached blocks that no request holds, at most as many as asked for. With a host tier
        their bytes are there when this returns."""
        count = rounded_up("need_block_num", need_block_num)
        with self._turns:
            self._cache.settle()
            self._cache.evict(count)
            self._changed()

    get_required_block_num = staticmethod(required_blocks)

    def get_prefill_threshold(self, num_new_blocks: int, num_running: int) -> int:
        """Blocks to be free before a scheduler admits a chunk. See
        `ManagerSettings.prefill_threshold`."""
        return self.settings.prefill_threshold(num_new_blocks, num_running, self.num_gpu_blocks)

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
            ConfigError: the last reset has failed.
            DeviceError: a copy does not end.
        """
        with self._turns:
            blocks, found = self._calls.match(task, block_size)
            self._gauges.matched(self.metrics)
            self._changed()
            return blocks, len(blocks) * block_size, found.metrics(block_size)

    def update_cache_blocks(self, task: Any, block_size: int, num_computed_tokens: int) -> None:
        """Index the full blocks of a request's first `num_computed_tokens` tokens, which are
        computed, or will be before all work that is scheduled later. Sets `task.num_cached_blocks`.

        Raises:
            LookupError: the request was not matched. During a reset that is no error.
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
        with self._turns:
            resetting = self.signals is not None and not self.signals.normal
            self._calls.commit(task, block_size, computed, resetting=resetting)
            self._changed()

    def release_block_ids(self, task: Any) -> None:
        """A request ends, is preempted or was not admitted: it holds its cached blocks no more.
        Nothing happens if it holds none."""
        with self._turns:
            self._cache.release(name_of(task))
            self._changed()

    def write_cache_to_storage(self, request: Any) -> None:
        """A request has finished: save its cached blocks, and report them to indexes. Returns after
        the last write. Failures are logged and counted.

        Any thread may call it, without the engine's lock, before `release_block_ids`."""
        self._calls.write(name_of(request))

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
        started, so there is none to end. See `check_launch` and `launch` in engine_signals.py."""
        check_launch(self, tensor_parallel_size, device_ids, create_cache_tensor)
        self.update_cache_config(cache_config)
        self.signals = launch(self, engine_worker_queue_port)
        self._cache.interrupted = self.signals.interrupted
        return []

    def attach(self) -> None:
        """Open host memory, storage and indexes over the tensors: the part of
        `launch_cache_manager` without signals, and with its errors."""
        with self._turns:
            self._tiers.attach(self.num_gpu_blocks)
            if self._cache.lower is not None:
                self.num_cpu_blocks = self._cache.lower.slots
            self._changed()

    def update_cache_config(self, cache_config: Any) -> None:
        """Take over the number of device blocks.

        Raises:
            ConfigError: it is not possible, or changes while blocks are in use.
            LayoutError: the tensors have fewer blocks.
        """
        with self._turns:
            total = total_blocks(cache_config)
            check_blocks(self.settings, total)
            self._tiers.check_blocks(total)
            self._cache.resize(total)
            self.cache_config, self.num_gpu_blocks = cache_config, total
            self._changed()

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        """Forget every block of device and host, and every request, after the writes in flight,
        whether `wait_for_tasks_done` or not. Stored objects stay, and are found again by requests
        of the same version of the weights. After an error no request is matched before a reset that
        succeeds: its blocks could be of other weights.

        Raises:
            DeadlineExceeded: a write to storage does not end.
            ConfigError: the version of the weights cannot be read.
            StoreError, SinkError: AttentionStore or an index cannot be opened.
        """
        with self._turns:
            self._tiers.begin_reset()
            self._cache.reset(2 * self.settings.storage.timeout_s)
            self.metrics.reset_metrics()
            self._tiers.renew()
            self._changed()

    def serve_status(self) -> None:
        """Reset if `prefix_tree_status` asks for it, as FastDeploy does around an update of the
        weights. To be called with the engine's lock, in each step of its scheduling loop."""
        if self.signals is not None:
            status_served(self.signals, self.reset)

    def statistics(self) -> ManagerStatistics:
        """Sizes, counters and rates."""
        return statistics_of(self._cache, self.metrics, self.num_cpu_blocks, self.cache_config)

    @property
    def troubles(self) -> tuple[str, ...]:
        """The parts that do not work, with reasons."""
        return self._tiers.troubles

    def close(self) -> None:
        """Close storage and indexes and let go of the tensors, any number of times."""
        self._tiers.close()
        if self.signals is not None:
            self.signals.close()

    def check(self) -> None:
        """AssertionError if blocks and references disagree, for tests."""
        self._cache.check()
