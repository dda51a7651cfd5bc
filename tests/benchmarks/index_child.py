"""SGLang's Rust tree for the benchmark `index`: a script for a Python that has SGLang and torch.

Only the extension module of SGLang's wheel is loaded. The prompts and the way to count are those of
`tests.benchmarks.index`, which imports them from here. Each line of the input asks for something, and
is answered with a line of JSON: `new`, `fill`, `insert`, `look_up`, `visit`.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.lines import answer_lines

GROUP_SIZE, LENGTH, SHARED = 8, 8192, 0.75
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
MODULE = "sglang.srt.mem_cache.rust_tree_core.mem_cache"

Prompts = list[NDArray[np.int64]]


def prompts(rng: np.random.Generator, count: int, length: int) -> Prompts:
    """Prompts in groups that share their beginning. The groups are of one size at any count, so
    that runs of few long prompts and of many short ones have as many new tokens."""
    groups = [rng.integers(0, 150_000, int(length * SHARED)) for _ in range(count // GROUP_SIZE)]
    rest = length - int(length * SHARED)
    return [
        np.concatenate([groups[i % len(groups)], rng.integers(0, 150_000, rest)])
        for i in range(count)
    ]


def stored_prompt(number: int) -> NDArray[np.int64]:
    """A prompt that the index has before the first round."""
    return np.random.default_rng([11, number]).integers(0, 150_000, LENGTH)


def batch_of(seed: int, count: int, length: int) -> Prompts:
    """The prompts of a round."""
    return prompts(np.random.default_rng([7, seed]), count, length)


def some_stored(seed: int, count: int, stored: int) -> Prompts:
    """Prompts that the index has, drawn from all of them."""
    drawn = np.random.default_rng([13, seed]).integers(0, stored, count)
    return [stored_prompt(int(number)) for number in drawn]


def resident_bytes() -> int:
    """Memory of this process, after a return of its free memory to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def keep_memory() -> None:
    """Have the allocator keep freed memory for the next round, as in a process that has run for a
    while: first accesses to new pages are not the tree's work. Our tree touches its memory when it
    is made, before the clock starts."""
    libc = ctypes.CDLL(None)
    for parameter, value in ((M_TRIM_THRESHOLD, 2**31 - 1), (M_MMAP_THRESHOLD, 32 << 20)):
        libc.mallopt(parameter, value)


class RustTree:
    """SGLang's tree, and the lines that it answers."""

    def __init__(self) -> None:
        import torch  # the extension module links against its libraries

        package = find_spec("sglang")
        if package is None or not package.submodule_search_locations:
            raise ModuleNotFoundError("No module named 'sglang'")
        folder = Path(package.submodule_search_locations[0], *MODULE.split(".")[1:-1])
        found = sorted(folder.glob("mem_cache.*.so"))
        if not found:
            raise ModuleNotFoundError(f"{folder} has no extension module of the Rust tree")
        spec = spec_from_file_location(MODULE, found[0])
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"{found[0]} cannot be loaded")
        self._module = module_from_spec(spec)
        spec.loader.exec_module(self._module)
        torch.set_num_threads(1)  # the processor time of threads that wait would count
        self._torch = torch
        self._tree: Any = None
        self._events = False
        self._stored = 0

    def new(self, block_size: int, hashes: bool) -> None:
        """Begin with an empty tree. hashes: whether it makes KV events, which need them."""
        module = self._module
        self._tree = None
        params = module.TreeCoreInitParamsBinding(
            eviction_policy="lru", page_size=block_size, device="cpu", enable_kv_cache_events=hashes
        )
        self._tree = module.RustUnifiedTreeCoreBinding(params, [0])
        self._events, self._stored = hashes, 0

    def fill(self, prompts: int) -> dict[str, Any]:
        """Store prompts that have nothing in common. Returns the memory that they take."""
        before = resident_bytes()
        for number in range(self._stored, self._stored + prompts):
            self._insert([stored_prompt(number)])
        self._stored += prompts
        return {"bytes": resident_bytes() - before}

    def insert(self, seed: int, count: int, length: int) -> dict[str, Any]:
        """Match and insert the prompts of a round."""
        return self._insert(batch_of(seed, count, length))

    def _insert(self, batch: Prompts) -> dict[str, Any]:
        tree, module, hits = self._tree, self._module, 0
        slots = [self._torch.arange(len(tokens)) for tokens in batch]
        began = time.process_time()
        for tokens, values in zip(batch, slots, strict=True):
            match = tree.match_prefix(module.MatchParamsBinding(key=tokens))
            run = match.device_prefix_len
            lock = tree.inc_lock_ref(match.last_device_node_id, [])
            tree.insert(module.InsertParamsBinding(key=tokens, value=values, prev_prefix_len=run))
            self._unlock(match.last_device_node_id, lock)
            if self._events:
                tree.take_events()
            hits += run
        return {"seconds": time.process_time() - began, "hits": hits}

    def look_up(self, seed: int, count: int) -> dict[str, Any]:
        """Match prompts that are stored, and hold them for a moment."""
        tree, module, hits = self._tree, self._module, 0
        batch = some_stored(seed, count, self._stored)
        began = time.process_time()
        for tokens in batch:
            match = tree.match_prefix(module.MatchParamsBinding(key=tokens))
            lock = tree.inc_lock_ref(match.last_device_node_id, [])
            self._unlock(match.last_device_node_id, lock)
            hits += match.device_prefix_len
        return {"seconds": time.process_time() - began, "hits": hits}

    def visit(self) -> None:
        """Match every stored prompt once."""
        for number in range(self._stored):
            key = self._module.MatchParamsBinding(key=stored_prompt(number))
            self._tree.match_prefix(key)

    def _unlock(self, node: int, lock: Any) -> None:
        params = self._module.DecLockRefParamsBinding(
            node_id=node,
            skipped_lock_components=lock.skipped_lock_components,
            component_lock_uuids=lock.component_lock_uuids,
            component_host_lock_uuids=lock.component_host_lock_uuids,
        )
        self._tree.dec_lock_ref(node, params, False)


if __name__ == "__main__":
    keep_memory()
    answer_lines(RustTree)
