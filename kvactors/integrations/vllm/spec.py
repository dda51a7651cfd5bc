"""vLLM's entry point: the `OffloadingSpec` that vLLM loads by module path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from vllm.config import get_current_vllm_config_or_none
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import OffloadingMetricMetadata, OffloadingSpec, OffloadingWorker
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from kvactors.device.arena import PAGE
from kvactors.errors import ConfigError
from kvactors.integrations.vllm.manager import DEFINITIONS, KVActorsManager
from kvactors.integrations.vllm.region import KVActorsWorker, TierRegion
from kvactors.integrations.vllm.settings import (
    WHERE,
    check_cache,
    chosen_worker,
    identity,
    read_settings,
    storage_of_replica,
    stored_model,
)
from kvactors.tier_cache import CopyWorker, TierConfig, open_tiers
from kvactors.tier_cache.settings import checked_config


class KVActorsOffloadingSpec(OffloadingSpec):
    """kvactors as vLLM's host tier and the storage below it, with `OffloadingSettings`.

    A row of the host tier holds the shares of all workers of one chunk, one after another. Rows of
    every group of layers have one size: vLLM's groups share the blocks of the device."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.settings = read_settings(config.extra_config)
        check_cache(config)
        self._copied_by = chosen_worker(self.settings, current_platform)
        self._worker_bytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
        row = self._worker_bytes * config.parallel.world_size
        self._row_bytes = -(-row // PAGE) * PAGE
        self.num_chunks = int(self.settings.cpu_bytes_to_use) // self._row_bytes
        if self.num_chunks < 1:
            raise ConfigError(
                f"{WHERE}: cpu_bytes_to_use = {self.settings.cpu_bytes_to_use} holds no chunk of "
                f"{self._row_bytes} bytes"
            )
        # before any memory is taken, and in every process
        self._tier_config = checked_config(self._tiers_of(config))
        self._manager: KVActorsManager | None = None
        self._worker: OffloadingWorker | None = None

    @classmethod
    def build_metric_definitions(
        cls, extra_config: Mapping[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return dict(DEFINITIONS)

    def _region(self, rank: int | None) -> TierRegion:
        return TierRegion(
            self.config.engine_id,
            self.num_chunks,
            self._row_bytes,
            self._worker_bytes,
            rank,
            numa_node=self.settings.numa_node,
        )

    def get_manager(self) -> KVActorsManager:
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def _tiers_of(self, config: Any) -> TierConfig:
        return TierConfig(
            model=self.settings.model or config.model.name,
            block_bytes=self._row_bytes,
            num_slots=self.num_chunks,
            identity=identity(config, copied_by=self._copied_by),
            policy=self.settings.eviction_policy,
            events=("host", "storage") if self.kv_events_config.enable_kv_cache_events else (),
            storage=storage_of_replica(self.settings.storage, config),
        )

    def _make_manager(self) -> KVActorsManager:
        model = stored_model(
            self.settings.model, self.config.model.name, get_current_vllm_config_or_none()
        )
        config = msgspec.structs.replace(self._tier_config, model=model)
        region = self._region(None)
        try:
            tiers = open_tiers(config, memory=region.view(), stride=self._row_bytes)
            tiers.start()
        except BaseException:
            region.close()
            raise
        # a step's result is known at most so many steps later: asynchronous scheduling and pipeline
        flush_steps = 3 + int(self.config.parallel.pp_size)
        chunk_tokens = {
            group.group_id: self.blocks_per_chunk * group.tokens_per_block
            for group in self.config.groups
        }
        return KVActorsManager(tiers, region, chunk_tokens=chunk_tokens, flush_steps=flush_steps)

    def _copies(self, kv_caches: Any, region: TierRegion) -> KVActorsWorker:
        copies = CopyWorker(
            [each.tensor for each in kv_caches.tensors],
            region.slots(),
            offset=self.config.parallel.rank * self._worker_bytes,
            blocks_per_slot=self.blocks_per_chunk,
        )
        return KVActorsWorker(copies, self.blocks_per_chunk, region, current_stream)

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker's side: vLLM's or ours, see `OffloadingSettings.copy_worker`."""
        if self._worker is None:
            region = self._region(self.config.parallel.rank)
            try:
                if self._copied_by == "kvactors":
                    self._worker = self._copies(kv_caches, region)
                else:
                    self._worker = CPUOffloadingWorker(
                        kv_caches=kv_caches,
                        blocks_per_chunk=self.blocks_per_chunk,
                        num_cpu_chunks=self.num_chunks,
                        mmap_region=region.shared,
                    )
            except BaseException:
                region.close()
                raise
        return self._worker


def current_stream() -> int | None:
    """The handle of the stream that vLLM's model runs on, None on a CPU."""
    if current_platform.is_cpu():
        return None
    return int(current_platform.current_stream().cuda_stream)
