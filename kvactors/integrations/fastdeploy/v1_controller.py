"""FastDeploy's v1 `CacheController`, in each worker's process (ENABLE_V1_KVCACHE_MANAGER=1)."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from kvactors.device.tensors import describe, rows_of
from kvactors.errors import (
    CacheClosed,
    ConfigError,
    DeadlineExceeded,
    DeviceError,
    KVActorsError,
    LayoutError,
)
from kvactors.integrations.fastdeploy.lower_tiers import ROLES, CacheKvsLayout, RankTensors, log
from kvactors.integrations.fastdeploy.settings import FastDeployOptions, read_settings
from kvactors.integrations.fastdeploy.v1_storage import (
    StorageTask,
    WorkerStorage,
    open_rank_storage,
)
from kvactors.layout import make_layout
from kvactors.tier_cache import CopyWorker, SlotMemory, StorageTier

STEMS = {role: stem for stem, role in ROLES.items()}

LAYER_LIMIT_S = 60.0  # of the copy of one layer

LayerWorkers = dict[int, list[CopyWorker]]
"""By layer: a worker for each tensor, whose host buffer has its blocks one after another."""


class LayerDoneCounter:
    """The ends of one load or eviction, layer by layer."""

    def __init__(
        self, layers: LayerWorkers, job: int, metadata: Any, errors: dict[Hashable, str]
    ) -> None:
        self._layers, self._job, self._metadata, self._errors = layers, job, metadata, errors

    def get_num_layers(self) -> int:
        return len(self._layers)

    def is_layer_done(self, layer_idx: int) -> bool:
        return all(one.wait([self._job], 0.0) for one in self._layers[layer_idx])

    def is_all_done(self) -> bool:
        return not self.get_pending_layers()

    def get_pending_layers(self) -> list[int]:
        return [layer for layer in self._layers if not self.is_layer_done(layer)]

    def wait_for_layer(self, layer_idx: int, timeout: float | None = None) -> bool:
        """Wait until the blocks of a layer have arrived, `timeout` seconds at most for each of its
        tensors (60 if None).

        Raises:
            DeadlineExceeded: they have not.
            DeviceError: the copy failed. The layer must not be computed.
        """
        limit = LAYER_LIMIT_S if timeout is None else timeout
        for one in self._layers[layer_idx]:
            if not one.wait([self._job], limit):
                raise DeadlineExceeded(f"layer {layer_idx} not copied after {limit:g} s")
            self._errors.update((end.job, end.error) for end in one.get_finished() if end.error)
        if error := self._errors.get(self._job):
            self._metadata.error_message = error
            raise DeviceError(f"layer {layer_idx} not copied: {error}")
        return True

    def wait_all(self, timeout: float | None = None) -> bool:
        """`wait_for_layer` of all layers."""
        for layer in self._layers:
            self.wait_for_layer(layer, timeout)
        self._metadata.success = True
        return True


class CacheController:
    """The cache tensors of one worker, their host buffers, and the copies between them.

    Calls come from the worker's thread. A copy that fails ends the step: an eviction raises at the
    next `submit_swap_tasks`, a load where its layer is waited for. FastDeploy has no way to tell
    the scheduler, and the worker must not compute from bytes that are not there.

    Args:
        config: FastDeploy's `FDConfig`.
        local_rank: of the worker on its machine. Names have it modulo the tensor parallel size.
        device_id: the number of the GPU in the names of tensors.
        options: as `CacheManager` has them. Needed with storage.
        stream: gives the handle of the GPU stream that copies come after, None for tensors in host
            memory.
        environ: variables, the process's environment if None.

    Attributes:
        cache_kvs_map: tensors by FastDeploy's names.
        host_cache_kvs_map: addresses of the host buffers by the same names.
        swap_layer_done_counter: of the last load.

    Raises:
        ConfigError: a setting cannot be honoured.
    """

    def __init__(
        self,
        config: Any,
        local_rank: int,
        device_id: int,
        *,
        options: FastDeployOptions | Mapping[str, Any] | None = None,
        stream: Callable[[], int | None] = lambda: None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        settings = self._settings = read_settings(
            config, None, None, None, options, environ, v1=True
        )
        self._num_slots, self._rank = settings.cache.num_cpu_blocks, local_rank % settings.ranks
        self._model = config.model_config
        self._quant_type = getattr(
            getattr(config, "quant_config", None), "kv_cache_quant_type", None
        )
        self._place = f"rank{self._rank}.device{device_id}"
        self._stream = stream
        self._tensors: RankTensors = {}
        self._hosts: list[tuple[Any, dict[str, int]]] = []  # buffers, by attention back end
        self._workers: LayerWorkers = {}
        self._pending: list[tuple[LayerDoneCounter, StorageTask | None]] = []
        self._copies: Counter[int] = Counter()  # to and from each host block
        self._errors: dict[Hashable, str] = {}  # by job
        self._jobs = 0
        self._tier: StorageTier | None = None
        self._storage: WorkerStorage | None = None  # over the host buffers
        self.write_policy = settings.cache.write_policy
        self.cache_kvs_map: dict[str, Any] = {}
        self.host_cache_kvs_map: dict[str, int] = {}
        self.swap_layer_done_counter: LayerDoneCounter | None = None

    # -- tensors and host buffers

    def initialize_kv_cache(self, attn_backend: Any, num_gpu_blocks: int) -> list[Any]:
        """Make the tensors of the main layers, and their host buffers if there are none yet.

        Returns:
            The tensors by layer, and within a layer key, value or indexer, key_scale, value_scale.

        Raises:
            LayoutError: the tensors do not have this number of blocks, or layers differ.
            DeviceError: the attention back end has no host cache.
            StoreError: storage cannot be used.
        """
        return self._make(attn_backend, num_gpu_blocks, self._model.num_hidden_layers, 0)

    def initialize_mtp_kv_cache(
        self, attn_backend: Any, num_gpu_blocks: int, num_mtp_layers: int, layer_offset: int
    ) -> list[Any]:
        """Make the tensors of the layers of drafts, from layer `layer_offset` on. They are copied
        with the main layers. See `initialize_kv_cache`."""
        return self._make(attn_backend, num_gpu_blocks, num_mtp_layers, layer_offset)

    def _make(self, backend: Any, num_blocks: int, layers: int, offset: int) -> list[Any]:
        self.reset_cache()
        made = backend.create_kv_cache(
            num_layers=layers,
            num_blocks=num_blocks,
            cache_dtype=self._model.dtype if self._quant_type is None else "uint8",
            kv_cache_quant_type=self._quant_type,
            layer_offset=offset,
        )
        tensors = {(layer, role): tensor for (role, layer), tensor in made.items()}
        layout = CacheKvsLayout(self._settings.block_size, tensors)
        rows = sorted({rows_of(tensor).rows for tensor in tensors.values()})
        found = sorted({layer for layer, _ in tensors})
        if rows != [num_blocks] or found != [*range(offset, offset + layers)]:
            raise LayoutError(
                f"{type(backend).__name__} made layers {found} of {rows} blocks: "
                f"{layers} layers from {offset} of {num_blocks} blocks are needed"
            )
        self._tensors |= tensors
        self.cache_kvs_map |= {self._name(*place): tensor for place, tensor in tensors.items()}
        self.initialize_host_cache(backend)
        settings = self._settings
        if self._tier is None and settings.storage.backend != "none":
            planned = make_layout(settings.config.layout, settings.block_size)
            self._tier = open_rank_storage(settings, planned, self._rank)
        return layout.ordered(tensors)

    def _name(self, layer: int, role: str) -> str:
        return f"{STEMS[role]}_{layer}_{self._place}"

    def initialize_host_cache(self, attn_backend: Any) -> dict[str, int]:
        """Make host buffers for the layers that have tensors and no buffers yet, none if
        `num_cpu_blocks` is 0. Returns `host_cache_kvs_map`. DeviceError if the back end has none:
        its `create_host_kv_cache` raises RuntimeError, NotImplementedError or ImportError, or
        returns None or too few."""
        hosts = self.host_cache_kvs_map
        lacking = sorted(place for place in self._tensors if self._name(*place) not in hosts)
        if not self._num_slots or not lacking:
            return hosts
        first, last = lacking[0][0], lacking[-1][0]
        try:
            made = attn_backend.create_host_kv_cache(
                num_layers=last - first + 1,
                num_blocks=self._num_slots,
                cache_item_bytes=describe(self._tensors[first, "key"]).item_bytes,
                kv_cache_quant_type=self._quant_type,
                layer_offset=first,
            )
            problem = "" if made else f"it returned {made!r}"
        except (RuntimeError, ImportError) as error:
            made, problem = None, repr(error)
        buffers = {self._name(layer, role): one for (role, layer), one in (made or {}).items()}
        if made and not all(buffers.get(self._name(*place)) for place in lacking):
            problem = f"it made {sorted(buffers)} only"
            attn_backend.free_host_kv_cache(buffers)
        if problem:
            raise DeviceError(
                f"attention back end {type(attn_backend).__name__} has no host cache for layers "
                f"{first} to {last}: {problem}. Set swap_space to 0, or choose another back end"
            )
        self._hosts.append((attn_backend, buffers))
        hosts |= buffers
        return hosts

    def get_kv_caches(self) -> dict[str, Any]:
        return self.cache_kvs_map

    def get_host_cache_kvs_map(self) -> dict[str, int]:
        return self.host_cache_kvs_map

    # -- copies

    def submit_swap_tasks(
        self, evict_metadata: Any, swap_in_metadata: Any
    ) -> LayerDoneCounter | None:
        """Begin the copies of a step: evictions first, then loads. Copies of earlier steps have
        ended before. With the write policy write_back the loads begin when the evictions have
        ended.

        Args:
            evict_metadata: device blocks in `src_block_ids`, host blocks in `dst_block_ids`, or
                None. `success` and `error_message` are set when it has been waited for.
            swap_in_metadata: host blocks in `src_block_ids`, device blocks in `dst_block_ids`.

        Returns:
            The ends of the loads, None without loads.

        Raises:
            ValueError: there are not as many sources as destinations, or one is out of range.
            DeviceError: a copy of an earlier step has failed, or an eviction of this one.
            DeadlineExceeded: an earlier copy does not end.
        """
        self._wait()
        if evict_metadata is not None:
            self._begin(evict_metadata, to_host=True)
            if self.write_policy == "write_back":
                self._wait()
        loads = None
        if swap_in_metadata is not None:
            loads = self.swap_layer_done_counter = self._begin(swap_in_metadata, to_host=False)
        if self._storage is not None:
            self._storage.begin_reads()
        return loads

    def _begin(self, metadata: Any, *, to_host: bool) -> LayerDoneCounter:
        sources, targets = metadata.src_block_ids, metadata.dst_block_ids
        if len(sources) != len(targets):
            raise ValueError(f"copies from {len(sources)} blocks to {len(targets)} blocks")
        self._open_workers()
        write = None
        if self._storage is not None and to_host:
            write = StorageTask(metadata, targets)
            self._storage.make_way(targets)
        self._jobs += 1
        for workers in self._workers.values():
            for one in workers:
                submit = one.submit_store if to_host else one.submit_load
                pairs = (sources, targets) if to_host else (targets, sources)
                submit(self._jobs, *pairs, stream=self._stream())
        self._copies.update(targets if to_host else sources)  # a refused call copies nothing
        counter = LayerDoneCounter(self._workers, self._jobs, metadata, self._errors)
        self._pending.append((counter, write))
        return counter

    def _open_workers(self) -> None:
        if self._workers:
            return
        if not self.host_cache_kvs_map:
            raise CacheClosed("there are no host buffers: initialize_kv_cache makes them")
        memories: dict[tuple[int, str], SlotMemory] = {}
        for place, tensor in sorted(self._tensors.items(), key=lambda one: one[0]):
            nbytes = rows_of(tensor).nbytes
            buffer = (ctypes.c_uint8 * (self._num_slots * nbytes)).from_address(
                self.host_cache_kvs_map[self._name(*place)]
            )
            memory = SlotMemory(self._num_slots, nbytes, np.ctypeslib.as_array(buffer))
            memories[place] = memory
            workers = self._workers.setdefault(place[0], [])
            workers.append(CopyWorker([tensor], memory, threads=1))
        if self._tier is not None and self._storage is None:
            self._storage = self._storage_over(self._tier, memories)

    def _storage_over(
        self, tier: StorageTier, memories: Mapping[tuple[int, str], SlotMemory]
    ) -> WorkerStorage:
        settings = self._settings
        layout = make_layout(settings.config.layout, settings.block_size)
        made = CacheKvsLayout(settings.block_size, self._tensors, settings.draft_layers)
        for one, other in zip_longest(layout.pieces, made.pieces):
            if one != other:
                raise LayoutError(f"options: layout has {one} where the tensors have {other}")
        ordered = [memories[piece.layer, piece.role] for piece in layout.pieces]
        return WorkerStorage(tier, ordered, self._copies, self._wait)

    def _wait(self) -> None:
        """Wait for the copies in flight, and write to storage what has come to the host."""
        pending, self._pending = self._pending, []
        for counter, write in pending:
            counter.wait_all()
            if write is not None and self._storage is not None:
                self._storage.write(write)

    # -- storage

    def prefetch_from_storage(self, metadata: Any) -> StorageTask:
        """Begin to read blocks from storage into the host blocks of a prefetch, after the copies
        that were issued before it.

        Raises:
            ConfigError: there is no storage.
            ValueError: there are not as many host blocks as hashes and numbers of copies.
            DeviceError, DeadlineExceeded: as `submit_swap_tasks`.
        """
        task = StorageTask(metadata, metadata.block_ids)
        self._used_storage().read(task, metadata.extra_params.get("copies", ()))
        return task

    def backup_host_to_storage(self, host_block_ids: Sequence[int], metadata: Any) -> StorageTask:
        """Begin to write host blocks to storage. Blocks that copies have brought to the host are
        written without it. See `prefetch_from_storage`."""
        task = StorageTask(metadata, host_block_ids)
        storage = self._used_storage()
        self._wait()
        storage.write(task)
        return task

    def _used_storage(self) -> WorkerStorage:
        self._open_workers()
        if self._storage is None:
            raise ConfigError("there is no storage: kvcache_storage_backend is none")
        return self._storage

    # -- ends

    def reset_cache(self) -> bool:
        """Wait for the copies. Returns whether all have ended. Tensors and buffers stay."""
        try:
            self._wait()
        except KVActorsError as error:
            log.error("a copy of an earlier step failed", error=str(error))
        workers, self._workers = self._workers, {}
        ended = [one.shutdown() for layer in workers.values() for one in layer]
        return all(ended)

    def free_gpu_cache(self) -> bool:
        """Let go of the tensors. Returns whether all copies have ended."""
        ended = self.reset_cache()
        self._tensors = {}
        self.cache_kvs_map.clear()
        return ended

    def free_cache(self, clear_storage: bool = False) -> bool:
        """Let go of the tensors, and free the host buffers through the back ends that made them.

        Args:
            clear_storage: delete this rank's objects.

        Returns:
            Whether all was freed. The buffers stay if a copy or a call to storage does not end.
        """
        ended = self.free_gpu_cache()
        storage, self._storage = self._storage, None
        tier, self._tier = self._tier, None
        if tier is not None:
            if clear_storage:
                tier.clear()
            tier.close(self._settings.storage.close_timeout_s)
            ended = ended and not tier.stuck
        if storage is not None:
            storage.give_up_reads()
        hosts, self._hosts = self._hosts, []
        self.host_cache_kvs_map.clear()
        for backend, buffers in hosts if ended else ():
            backend.free_host_kv_cache(buffers)
        return ended

    def get_stats(self) -> dict[str, Any]:
        """Sizes of now, under FastDeploy's names."""
        return {
            "initialized": bool(self._tensors),
            "num_layers": self._model.num_hidden_layers,
            "pending_evict_counters": len(self._pending),
        }
