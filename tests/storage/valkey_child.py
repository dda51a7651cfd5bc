"""A process that writes blocks to a Valkey server with a whole cache, and ends."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import kvactors
from kvactors import Config
from kvactors.storage.factory import make_backend
from tests.support.cache import serve


def settings(url: str, *, exclusive: bool = False) -> dict[str, Any]:
    return {
        "cache": {"model": "m", "block_size": 16},
        "device": {"num_blocks": 32},
        "host": {"slots": 16},
        "layout": {"num_layers": 2, "num_kv_heads": 2, "head_dim": 32},
        "storage": {
            "backend": "valkey",
            "write_policy": "write_through",
            "exclusive": exclusive,
            "valkey": {"url": url},
        },
        "flush": {"sinks": [{"kind": "memory", "tiers": ["device", "host", "storage"]}]},
    }


def backend(table: dict[str, Any]) -> Any:
    return make_backend(Config.from_mapping(table).storage, "m", bytes(32), 4096)


async def main(url: str) -> None:
    async with kvactors.open(Config.from_mapping(settings(url))) as cache:
        for seed in range(6):
            await serve(cache, f"r{seed}", [seed] * 129)
        await cache.wait_idle()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
