"""vLLM's own tiers on a CPU, for the benchmark `engine`. vLLM loads this module by its path, in its
own environment."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvactors.integrations.vllm.region import KVActorsWorker
from kvactors.tier_cache import CopyWorker, SlotMemory


class VllmTiers(TieringOffloadingSpec):
    """vLLM's host tier and the tiers below it. vLLM's own worker needs a GPU, so kvactors' copies
    between the device and vLLM's host tier."""

    _worker: Any

    def get_worker(self, kv_caches: Any) -> Any:
        """The worker of the CPU platform."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            row = self.kv_bytes_per_chunk
            memory = SlotMemory(
                self.num_chunks, row, memoryview(region.create_kv_memoryview()).cast("B"), row
            )
            copies = CopyWorker(
                [each.tensor for each in kv_caches.tensors],
                memory,
                blocks_per_slot=self.blocks_per_chunk,
            )
            memory.close()
            self._worker = KVActorsWorker(copies, self.blocks_per_chunk, Region(region))
        return self._worker


class Region:
    """vLLM's region with the `close` that the worker calls."""

    def __init__(self, region: Any) -> None:
        self._region = region

    def close(self) -> None:
        """Unmap the memory."""
        self._region.cleanup()
