"""vLLM's offloading specs that the benchmark `engine` compares, with clocks around the calls.

vLLM loads this module by its path, in its own environment.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvactors.integrations.vllm import KVActorsOffloadingSpec
from kvactors.integrations.vllm.region import KVActorsWorker
from kvactors.tier_cache import CopyWorker, SlotMemory


class Times:
    """Seconds of calls and jobs in this process.

    Attributes:
        lookups: of each look-up.
        loads, stores: from the submission of each copy to the report of its end.
    """

    def __init__(self) -> None:
        self.lookups: list[float] = []
        self.loads: list[float] = []
        self.stores: list[float] = []
        self._begun: dict[int, tuple[list[float], float]] = {}

    def take(self) -> tuple[list[float], list[float], list[float]]:
        """Look-ups, loads and stores since the last call."""
        found = (self.lookups[:], self.loads[:], self.stores[:])
        for times in (self.lookups, self.loads, self.stores):
            times.clear()
        return found

    def lookup(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A look-up with a clock around it."""

        def timed(*arguments: Any) -> Any:
            began = time.perf_counter()
            found = call(*arguments)
            self.lookups.append(time.perf_counter() - began)
            return found

        return timed

    def submit(self, call: Callable[..., bool], into: list[float]) -> Callable[..., bool]:
        """A submission that starts a clock."""

        def timed(job: int, *arguments: Any, **more: Any) -> bool:
            self._begun[job] = (into, time.perf_counter())
            return call(job, *arguments, **more)

        return timed

    def finished(self, call: Callable[[], Iterable[Any]]) -> Callable[[], list[Any]]:
        """A poll that stops the clocks."""

        def timed() -> list[Any]:
            results = list(call())
            now = time.perf_counter()
            for result in results:
                into, began = self._begun.pop(result.job_id)
                into.append(now - began)
            return results

        return timed

    def around(self, spec: type[Any]) -> None:
        """Put clocks around the calls of a spec's manager and worker."""
        get_manager, get_worker = spec.get_manager, spec.get_worker

        def manager_of(self_: Any) -> Any:
            manager = get_manager(self_)
            if "lookup" not in vars(manager):
                manager.lookup = self.lookup(manager.lookup)
            return manager

        def worker_of(self_: Any, kv_caches: Any) -> Any:
            worker = get_worker(self_, kv_caches)
            if "submit_load" not in vars(worker):
                worker.submit_load = self.submit(worker.submit_load, self.loads)
                worker.submit_store = self.submit(worker.submit_store, self.stores)
                worker.get_finished = self.finished(worker.get_finished)
            return worker

        spec.get_manager, spec.get_worker = manager_of, worker_of


TIMES = Times()


class Ours(KVActorsOffloadingSpec):
    """kvactors' host tier and storage."""


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


for measured in (Ours, VllmTiers):
    TIMES.around(measured)
