"""vLLM's `fs` tier for the benchmark `store`: a script for a Python that has vLLM.

Its lines are `open`, `move` and `close`.
"""

from __future__ import annotations

import mmap
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.benchmarks.lines import answer_lines, processor_seconds


def spec() -> Any:
    """The parts of an offloading specification that the tier reads."""
    parallel = SimpleNamespace(
        rank=0, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        groups=[],
        parallel=parallel,
        canonical_layout=False,
        replicated_layout=False,
        kv_cache_layout=None,
        model=SimpleNamespace(name="bench", dtype="float16"),
        cache=SimpleNamespace(tokens_per_hash=16),
    )
    return SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=None)


class Tier:
    """The tier over a folder, with 16 + 16 threads, its default."""

    def open(self, folder: str, size: int, slots: int) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self.folder, self.size, self.slots = folder, size, slots
        memory = np.frombuffer(mmap.mmap(-1, slots * size), np.uint8).reshape(slots, size)
        for slot in range(slots):
            memory[slot] = np.frombuffer(np.random.default_rng(slot).bytes(size), np.uint8)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.manager: Any = FileSystemTierManager(spec(), memory.data, "fs", folder)
        self.jobs = 0

    def move(self, what: str, count: int, batch: int) -> dict[str, Any]:
        """Write or read objects, all jobs submitted at once."""
        from vllm.v1.kv_offload.base import make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        submit = self.manager.submit_store if what == "write" else self.manager.submit_load
        waiting, failed = 0, 0
        began, used = time.perf_counter(), processor_seconds()
        for start in range(0, count, batch):
            some = range(start, min(start + batch, count))
            keys = [make_offload_key(i.to_bytes(32, "little"), 0) for i in some]
            chunks = np.array([i % self.slots for i in some])
            self.jobs += 1
            submit(TransferJob(self.jobs, keys, chunks, what == "read", None))
            waiting += 1
        while waiting:
            for done in self.manager.get_finished_jobs():
                waiting -= 1
                failed += not done.success
            time.sleep(0.0005)
        return {
            "seconds": time.perf_counter() - began,
            "processor": processor_seconds() - used,
            "failed": failed,
        }

    def close(self) -> None:
        """End the threads and remove the files."""
        self.manager.shutdown()
        shutil.rmtree(self.folder)


if __name__ == "__main__":
    answer_lines(Tier)
