"""vLLM's or SGLang's part of the benchmark `decode`: a script for a Python that has one of them.

The prompts and tokens are those of `tests.benchmarks.decode`, which imports them from here. Each
`round` of the input is answered with the processor seconds of its steps.
"""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import numpy as np

from tests.benchmarks.lines import answer_lines

LENGTH, STEPS = 256, 192
"""Tokens of the shortest prompt, and steps of a round."""


def prompts(requests: int) -> list[list[int]]:
    """Prompts whose blocks do not end in the same step."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, 150_000, LENGTH + n % 64).tolist() for n in range(requests)]


def tokens_of(requests: int) -> list[list[int]]:
    """A token for each request, by step."""
    rows: list[list[int]] = (
        np.random.default_rng(4).integers(0, 150_000, (STEPS, requests)).tolist()
    )
    return rows


def vllm_round(requests: int, block: int) -> float:
    """The calls of vLLM's scheduler."""
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    hashed = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hashed)
    first = prompts(requests)
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.bfloat16)
    manager = KVCacheManager(
        KVCacheConfig(
            num_blocks=sum((len(one) + STEPS) // block + 3 for one in first),
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        max_model_len=16_384,
        scheduler_block_size=block,
        hash_block_size=block,
        enable_caching=True,
    )
    hasher = kv_cache_utils.get_request_block_hasher(block, hashed)
    running = []
    for number, tokens in enumerate(first):
        request = Request(
            str(number), tokens, SamplingParams(max_tokens=100_000), None, block_hasher=hasher
        )
        blocks, count, *_ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, len(tokens) - count, count, blocks)
        request.num_computed_tokens = len(tokens)
        running.append(request)
    rows = tokens_of(requests)
    gc.collect()
    gc.freeze()
    began = time.process_time()
    for row in rows:
        for request, token in zip(running, row, strict=True):
            request.append_output_token_ids(token)
        for request in running:
            new = manager.allocate_slots(request, 1)
            if new is None:
                raise RuntimeError("vLLM lacks blocks")
            new.get_block_ids(allow_none=True)
            request.num_computed_tokens += 1
    took = time.process_time() - began
    gc.unfreeze()
    return took


def sglang_round(requests: int, block: int) -> float:
    """The calls of SGLang's `alloc_for_decode`, of a whole batch."""
    import torch
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    torch.set_num_threads(1)
    lengths = torch.tensor([len(one) for one in prompts(requests)])
    room = int(lengths.max()) + STEPS + block
    pool = requests * (room // block + 2) * block
    allocator = PagedTokenToKVPoolAllocator(pool, block, torch.bfloat16, "cpu", None, False)
    allocator.use_triton_kernels = False
    table = torch.zeros((requests, room), dtype=torch.int32)
    index = torch.arange(requests)
    for row, length in enumerate(lengths.tolist()):
        table[row, :length] = allocator.alloc(-(-length // block) * block)[:length]
    gc.collect()
    began = time.process_time()
    for _ in range(STEPS):
        last = table[index, lengths - 1].to(torch.int64)
        longer = lengths + 1
        places = allocator.alloc_decode(longer, longer, last)
        if places is None:
            raise RuntimeError("SGLang lacks blocks")
        table[index, lengths] = places.to(torch.int32)
        lengths = longer
    return time.process_time() - began


class Rounds:
    """The rounds of a peer."""

    def __init__(self) -> None:
        self.measure: Any = {"vllm": vllm_round, "sglang": sglang_round}[sys.argv[1]]

    def round(self, requests: int, block: int) -> dict[str, float]:
        return {"seconds": self.measure(requests, block)}


if __name__ == "__main__":
    answer_lines(Rounds)
