"""vLLM's and LMCache's own tiers for `service`: a script for a Python that has one of them.

Its argument is `vllm` or `lmcache`, its lines are `open` (over what the folder holds), `move` and
`close`.
Blocks are copied between the tiers' memory and an array that stands for the device.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.lines import answer_lines

STEP = 512
"""Blocks of an engine's step: 8,192 tokens."""
LIMIT_S = 60.0
RING = 4096
"""Blocks of the device."""


def names(prompt: int, blocks: int) -> list[bytes]:
    """Names of the blocks of a prompt."""
    return [hashlib.sha256(f"{prompt} {block}".encode()).digest() for block in range(blocks)]


class Tiers:
    """Tiers of an engine over a folder.

    Attributes:
        step: blocks that are offered at once. LMCache never frees a large part of its memory.
        device: the device's blocks.
    """

    def __init__(self, folder: str, size: int, slots: int) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.step = max(1, min(STEP, slots // 8))
        noise = np.random.default_rng(0).integers(0, 256, RING * size, np.uint8)
        self.device = noise.reshape(RING, size)

    def stored(self) -> int:
        """Blocks in the folder."""
        return sum(path.suffix in (".bin", ".data") for path in self.folder.rglob("*"))


class VllmTiers(Tiers):
    """`TieringOffloadingManager` over a `FileSystemTierManager`, called as vLLM's scheduler does."""

    def __init__(self, folder: str, size: int, slots: int) -> None:
        super().__init__(folder, size, slots)
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering import manager
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        from tests.benchmarks.store_child import spec

        self.base: Any = base
        region = SharedOffloadRegion(f"service_{os.getpid()}", slots, None, size, size)
        primary = manager.CPUPrimaryTierOffloadingManager(slots, region)
        view = primary.get_kv_memoryview()
        self.memory = np.frombuffer(view, np.uint8).reshape(slots, size)
        self.memory[:] = 1  # no page of it is new to the first transfer
        tier = FileSystemTierManager(spec(), view, "fs", folder)
        self.manager: Any = manager.TieringOffloadingManager(primary, [tier])

    def request(self, prompt: int, blocks: int) -> tuple[Any, list[Any]]:
        """A request of the scheduler, and the keys of its blocks."""
        context = self.base.ReqContext(f"{prompt}-{time.monotonic_ns()}")
        self.manager.on_new_request(context)
        return context, [self.base.make_offload_key(name, 0) for name in names(prompt, blocks)]

    def end_step(self) -> None:
        """The end of a scheduler's step. The step of a model takes longer than this pause."""
        self.manager.on_schedule_end(self.base.ScheduleEndContext((), ()))
        time.sleep(0.001)

    def save(self, prompts: int, blocks: int) -> None:
        """Offer the blocks of each step until they are taken, as the scheduler does."""
        for prompt in range(prompts):
            context, keys = self.request(prompt, blocks)
            for some in (keys[i : i + self.step] for i in range(0, blocks, self.step)):
                while (taken := self.manager.prepare_store(some, context)) is None:
                    self.end_step()
                for slot in taken.store_spec.chunk_ids:
                    self.memory[slot] = self.device[slot % RING]
                if taken.keys_to_store:
                    self.manager.complete_store(taken.keys_to_store, context)
                self.end_step()
            self.manager.on_request_finished(context)
        while self.manager.has_pending_work():
            self.end_step()

    finish = save

    def back(self, prompts: int, blocks: int, at_once: int) -> int:
        """Look the prompts up in every step until no look-up is deferred, and load what was hit."""
        waiting = list(range(prompts))
        running: list[tuple[Any, list[Any]]] = []
        found = 0
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(self.request(waiting.pop(0), blocks))
            for one in list(running):
                context, keys = one
                hits = self.hits(context, keys)
                if hits is None:
                    continue
                if hits:
                    for slot in self.manager.prepare_load(keys[:hits], context).chunk_ids:
                        self.device[slot % RING] = self.memory[slot]
                    self.manager.complete_load(keys[:hits], context)
                self.manager.on_request_finished(context)
                running.remove(one)
                found += hits
            self.end_step()
        return found

    def hits(self, context: Any, keys: list[Any]) -> int | None:
        """Consecutive blocks that are hit, None while a look-up is deferred."""
        count, deferred, result = 0, False, self.base.LookupResult
        for key in keys:
            answer = self.manager.lookup(key, context)
            if answer is result.MISS:
                break
            deferred |= answer is not result.HIT
            count += 1
        return None if deferred else count

    def close(self) -> None:
        """End the threads."""
        del self.memory
        self.manager.shutdown()


class LmcacheTiers(Tiers):
    """LMCache's `StorageManager` over its native file adapter."""

    def __init__(self, folder: str, size: int, slots: int) -> None:
        super().__init__(folder, size, slots)
        import torch
        from lmcache.v1.distributed import api
        from lmcache.v1.distributed.config import parse_args
        from lmcache.v1.distributed.storage_manager import StorageManager

        self.api, self.layout = api, api.MemoryLayoutDesc([torch.Size([size])], [torch.uint8])
        adapter = {"type": "fs_native", "base_path": folder, "num_workers": 16, "use_odirect": True}
        line = ["--l1-size-gb", str(slots * size / (1 << 30)), "--no-l1-use-lazy"]
        line += ["--eviction-policy", "LRU", "--l2-adapter", json.dumps(adapter)]
        self.manager: Any = StorageManager(parse_args(line))

    def keys(self, prompt: int, blocks: int) -> list[Any]:
        """Keys of a prompt's blocks."""
        rank = self.api.ObjectKey.ComputeKVRank(1, 0, 1, 0)
        return [self.api.ObjectKey(name, "bench", rank) for name in names(prompt, blocks)]

    def offer(self, keys: Sequence[Any]) -> int:
        """Offer blocks once. Returns how many were taken."""
        reserved = self.manager.reserve_write(list(keys), self.layout)
        for place, one in enumerate(reserved.values()):
            bytes_of(one)[:] = self.device[place % RING]
        self.manager.finish_write(list(reserved))
        return len(reserved)

    def save(self, prompts: int, blocks: int, *, again: bool = True) -> None:
        """Offer the blocks of each step, and wait for their files. again: until all are stored."""
        target = self.stored()
        for prompt in range(prompts):
            keys = self.keys(prompt, blocks)
            for some in (keys[i : i + self.step] for i in range(0, blocks, self.step)):
                taken = self.offer(some)
                target += len(some) if again else taken
                while again and self.stored() < target:
                    time.sleep(0.005)
                    self.offer(some)
        until = time.monotonic() + LIMIT_S
        while self.stored() < target and time.monotonic() < until:
            time.sleep(0.005)

    def finish(self, prompts: int, blocks: int) -> None:
        """Offer each block once, as LMCache's server does."""
        self.save(prompts, blocks, again=False)

    def back(self, prompts: int, blocks: int, at_once: int) -> int:
        """Prefetch prompts, and read what was hit."""

        def one(prompt: int) -> int:
            keys = self.keys(prompt, blocks)
            group = self.api.GroupedObjectKeys(keys, 0, self.layout)
            handle = self.manager.submit_prefetch_task(self.api.PrefetchTaskSpec([group]))
            if not self.manager.wait_prefetch_status(handle, LIMIT_S):
                raise RuntimeError("a prefetch does not end")
            hits: int = self.manager.query_prefetch_status(handle).hit_cells[0].popcount()
            if hits:
                with self.manager.read_prefetched_results(keys[:hits]) as objects:
                    for place, found in enumerate(objects):
                        self.device[place % RING] = bytes_of(found)
                self.manager.finish_read_prefetched(keys[:hits])
            return hits

        with ThreadPoolExecutor(at_once) as clients:
            return sum(clients.map(one, range(prompts)))

    def close(self) -> None:
        """End the manager."""
        self.manager.close()


def bytes_of(one: Any) -> Any:
    """The bytes of an object of LMCache."""
    return np.frombuffer(memoryview(one.byte_array).cast("B"), np.uint8)


class Service:
    """The tiers of an engine, and what is asked of them."""

    def open(self, folder: str, size: int, slots: int) -> None:
        kinds: Any = {"vllm": VllmTiers, "lmcache": LmcacheTiers}
        self.tiers = kinds[sys.argv[1]](folder, size, slots)

    def move(self, what: str, **work: int) -> dict[str, Any]:
        """Do `save`, `finish` or `back`. Returns the blocks that were moved, and the seconds."""
        before, began = self.tiers.stored(), time.perf_counter()
        found = getattr(self.tiers, what)(**work)
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "blocks": self.tiers.stored() - before if found is None else found,
        }

    def close(self) -> None:
        self.tiers.close()


if __name__ == "__main__":
    answer_lines(Service)
