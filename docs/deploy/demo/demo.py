"""A demo process: conversations on a small cache in host memory, with metrics on port 9464.

python docs/deploy/demo/demo.py [--host 127.0.0.1] [--port 9464] [--seconds 0]
"""

from __future__ import annotations

import argparse
import asyncio
import random

import kvactors
from kvactors.observe.http_endpoint import serve_metrics

BLOCK = 16
SYSTEM_PROMPTS = [[number] * 256 for number in range(1, 5)]
CONFIG = {
    "cache": {"model": "demo", "block_size": BLOCK},
    "device": {"num_blocks": 512},
    "layout": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
    "host": {"slots": 2048},
    "storage": {"backend": "memory", "write_policy": "write_through", "capacity_blocks": 8192},
    "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
}


async def conversation(cache: kvactors.KVCache, number: int, rng: random.Random) -> None:
    """A few turns, each of which extends the prompt."""
    tokens = list(rng.choice(SYSTEM_PROMPTS))
    for turn in range(rng.randint(1, 6)):
        tokens += [rng.randrange(50_000) for _ in range(rng.randint(20, 120))]
        try:
            async with await cache.acquire(f"{number}-{turn}", tokens, wait_for_room=True) as lease:
                await lease.wait_ready()
                await asyncio.sleep((len(tokens) - lease.cached_tokens) / 20_000)
                await lease.commit(len(tokens))
        except kvactors.KVActorsError as error:
            print(f"request {number}-{turn}: {error}", flush=True)
        await asyncio.sleep(rng.expovariate(0.5))


async def main(host: str, port: int, seconds: float) -> None:
    """Serve conversations until the time is over, or without end for 0 seconds."""
    rng = random.Random(1)
    config = kvactors.Config.from_mapping(CONFIG)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds if seconds else float("inf")
    running: set[asyncio.Task[None]] = set()
    async with kvactors.open(config) as cache, serve_metrics(cache, port, host) as endpoint:
        print(f"http://{host}:{endpoint.port}/metrics", flush=True)
        number = 0
        while loop.time() < end:
            number += 1
            task = loop.create_task(conversation(cache, number, rng))
            running.add(task)
            task.add_done_callback(running.discard)
            await asyncio.sleep(rng.expovariate(10.0))
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A demo process with metrics.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9464)
    parser.add_argument("--seconds", type=float, default=0.0)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.host, arguments.port, arguments.seconds))
