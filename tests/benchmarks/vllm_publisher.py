"""vLLM's own publisher of KV events, as the peer of the benchmark `flush`: a script for a Python that has
vLLM, and for no other import.

It publishes COUNT batches of EVENTS events at ENDPOINT once a line arrives on its input. As in
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


def main() -> None:
    """Publish, and keep the sockets open until the input ends."""
    endpoint = sys.argv[1]
    count, blocks, tokens, together = map(int, sys.argv[2:6])
    module = kv_events()
    rng = random.Random(1)
    requests = []
    for _ in range(REQUESTS):
        ids = [rng.randrange(150_000) for _ in range(2 * blocks * tokens)]
        requests.append((ids, [rng.randbytes(32) for _ in range(blocks)], rng.randbytes(32)))
    publisher = module.ZmqEventPublisher(0, endpoint=endpoint, hwm=count + 10)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(count):
        events = []
        for one in range(number * together, (number + 1) * together):
            ids, hashes, parent = requests[one % REQUESTS]
            event = module.BlockStored(
                block_hashes=[int.from_bytes(key, "big") & HASH_MASK for key in hashes],
                parent_block_hash=int.from_bytes(parent, "big") & HASH_MASK,
                token_ids=ids[blocks * tokens :],
                block_size=tokens,
                lora_id=None,
                medium="GPU",
                lora_name=None,
            )
            events.append(event)
        publisher.publish(module.KVEventBatch(ts=time.time(), events=events))
    sys.stdin.readline()


if __name__ == "__main__":
    main()
