"""Caches of different models and namespaces over one directory: no block of one is a hit in
another. The identities of moved folders are in `test_file_table`."""

from __future__ import annotations

import kvactors
from kvactors.settings import Config


def config(tmp_path, model: str, **cache) -> Config:
    return Config.from_mapping(
        {
            "cache": {"block_size": 4, "model": model, **cache},
            "device": {"num_blocks": 8},
            "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 8},
            "storage": {
                "backend": "file",
                "directory": str(tmp_path),
                "write_policy": "write_through",
            },
        }
    )


async def hits(config: Config) -> kvactors.Hits:
    """The hits of one request of a fixed prompt, which then stores its blocks."""
    async with kvactors.open(config) as cache:
        async with await cache.acquire("r", list(range(17))) as lease:
            await lease.wait_ready()
            found = lease.hits
            await lease.commit(17)
        await cache.wait_idle()
        return found


async def test_two_models_of_one_shape_share_a_directory_and_no_block(tmp_path):
    assert await hits(config(tmp_path, "a")) == kvactors.Hits(0, 0, 0)
    assert await hits(config(tmp_path, "b")) == kvactors.Hits(0, 0, 0)
    assert await hits(config(tmp_path, "a", namespace="weights-2")) == kvactors.Hits(0, 0, 0)
    assert await hits(config(tmp_path, "a")) == kvactors.Hits(0, 0, 4)
    assert await hits(config(tmp_path, "b")) == kvactors.Hits(0, 0, 4)
