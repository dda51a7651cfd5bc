"""vLLM's `fs` tier for the benchmark `store`: a script for a Python that has vLLM.

Each line of its input asks for something, and is answered with a line of JSON: `open` (folder,
size, slots), `write` and `read` (first, count, batch), `close`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np


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


def processor_seconds() -> float:
    """Processor time of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Tier:
    """The tier over a folder, with 16 + 16 threads, its default."""

    def __init__(self, folder: str, size: int, slots: int) -> None:
        from vllm.v1.kv_offload.tiering.fs import io
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        self.folder, self.size, self.slots = folder, size, slots
        memory = np.frombuffer(mmap.mmap(-1, slots * size), np.uint8).reshape(slots, size)
        for slot in range(slots):
            memory[slot] = np.frombuffer(np.random.default_rng(slot).bytes(size), np.uint8)
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.manager: Any = FileSystemTierManager(spec(), memory.data, "fs", folder)
        self.native = bool(io._HAS_FSIO_C)
        self.jobs = 0

    def move(self, what: str, first: int, count: int, batch: int) -> dict[str, Any]:
        """Write or read objects, all jobs submitted at once."""
        from vllm.v1.kv_offload.base import make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        submit = self.manager.submit_store if what == "write" else self.manager.submit_load
        waiting, failed = 0, 0
        began, used = time.perf_counter(), processor_seconds()
        for start in range(0, count, batch):
            some = range(start, min(start + batch, count))
            keys = [make_offload_key((first + i).to_bytes(32, "little"), 0) for i in some]
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
            "native": self.native,
            "direct": bool(self.manager._use_o_direct),
        }

    def close(self) -> None:
        """End the threads and remove the files."""
        self.manager.shutdown()
        shutil.rmtree(self.folder)


def main() -> None:
    """Answer each line of the input."""
    answers = os.fdopen(os.dup(1), "w")  # vLLM prints to standard output
    os.dup2(2, 1)
    tier: Tier | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        answer: dict[str, Any] = {}
        if asked["do"] == "open":
            tier = Tier(asked["folder"], asked["size"], asked["slots"])
        elif tier is not None and asked["do"] == "close":
            tier.close()
            tier = None
        elif tier is not None:
            answer = tier.move(asked["do"], asked["first"], asked["count"], asked["batch"])
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
