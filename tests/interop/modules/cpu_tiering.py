"""vLLM's tiering spec on a CPU, where vLLM has no worker: with kvactors' worker."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvactors.integrations.vllm.region import KVActorsWorker
from kvactors.tier_cache import CopyWorker, SlotMemory


class VllmRegion:
    """vLLM's host memory, as `KVActorsWorker` closes it."""

    def __init__(self, spec: Any) -> None:
        self._shared = SharedOffloadRegion(
            engine_id=spec._engine_id,
            num_chunks=spec.num_chunks,
            rank=0,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        view = self._shared.create_kv_memoryview()
        self.memory = SlotMemory(spec.num_chunks, spec.kv_bytes_per_chunk, view)

    def close(self) -> None:
        self.memory.close()
        self._shared.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """The spec of the tests of `KVActorsTier`."""

    def get_worker(self, kv_caches: Any) -> KVActorsWorker:
        if self._worker is None:
            region = VllmRegion(self)
            tensors = [each.tensor for each in kv_caches.tensors]
            copies = CopyWorker(tensors, region.memory, blocks_per_slot=self.blocks_per_chunk)
            self._worker = KVActorsWorker(copies, self.blocks_per_chunk, region)
        return self._worker
