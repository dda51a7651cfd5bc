"""vLLM's own publisher of KV events, as the peer of the benchmark `flush`: a script for a Python that has
vLLM, and for no other import.

Its lines are `bind` (once it listens at ENDPOINT) and `publish` (COUNT batches of EVENTS events). As in
vLLM's scheduler, an event is made from block hashes in bytes and from the token ids of a request,
and a batch is handed to the publisher's thread.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import time
import types
from pathlib import Path
from typing import Any

from tests.benchmarks.lines import answer_lines

HASH_MASK = (1 << 64) - 1
REQUESTS = 256


def kv_events() -> Any:
    """VLLM's module of KV events. Where the rest of vLLM cannot be imported (it needs torch), with
    empty packages above the module."""
    name = "vllm.distributed.kv_events"
    try:
        return importlib.import_module(name)
    except ImportError:
        for known in [module for module in sys.modules if module.partition(".")[0] == "vllm"]:
            del sys.modules[known]
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("this Python has no vLLM")
    folder = Path(spec.submodule_search_locations[0])
    for package in (
        "vllm",
        "vllm.config",
        "vllm.utils",
        "vllm.distributed",
        "vllm.v1",
        "vllm.v1.core",
    ):
        module = types.ModuleType(package)
        module.__path__ = [str(folder.joinpath(*package.split(".")[1:]))]
        sys.modules[package] = module
    sys.modules.setdefault("torch", types.ModuleType("torch"))
    utils: Any = types.ModuleType("vllm.v1.core.kv_cache_utils")
    utils.ExternalBlockHash = bytes | int
    sys.modules[utils.__name__] = utils
    return importlib.import_module(name)


class Publisher:
    """vLLM's publisher and the requests whose events it publishes."""

    def __init__(self, endpoint: str, count: int, blocks: int, tokens: int, together: int) -> None:
        self.module = kv_events()
        self.count, self.tokens, self.together = count, tokens, together
        rng = random.Random(1)
        self.requests = []
        for _ in range(REQUESTS):
            ids = [rng.randrange(150_000) for _ in range(2 * blocks * tokens)]
            hashes = [rng.randbytes(32) for _ in range(blocks)]
            self.requests.append((ids[blocks * tokens :], hashes, rng.randbytes(32)))
        self.publisher = self.module.ZmqEventPublisher(0, endpoint=endpoint, hwm=count + 10)

    def bind(self) -> None:
        """Answered once the publisher listens."""

    def publish(self) -> None:
        for number in range(self.count):
            first = number * self.together
            events = [self.event(one) for one in range(first, first + self.together)]
            self.publisher.publish(self.module.KVEventBatch(ts=time.time(), events=events))

    def event(self, number: int) -> Any:
        ids, hashes, parent = self.requests[number % REQUESTS]
        return self.module.BlockStored(
            block_hashes=[int.from_bytes(key, "big") & HASH_MASK for key in hashes],
            parent_block_hash=int.from_bytes(parent, "big") & HASH_MASK,
            token_ids=ids[:],
            block_size=self.tokens,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )


if __name__ == "__main__":
    answer_lines(lambda: Publisher(sys.argv[1], *map(int, sys.argv[2:6])))
