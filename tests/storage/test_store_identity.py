"""Stores of different models, namespaces and ranks: no block of one is a hit in another, wherever
its folder is."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import kvactors
from kvactors.device.arena import Arena
from kvactors.errors import StoreError
from kvactors.identity import StoreIdentity
from kvactors.settings import Config, StorageConfig
from kvactors.storage.backend import Backend
from kvactors.storage.factory import make_backend
from kvactors.storage.messages import Outcome

SIZE, PRINT, KEY = 5000, bytes(range(32)), bytes([7]) * 32


def never() -> bool:
    return False


def fields(**changes):
    return {"model": "m", "namespace": "n", "rank": 0, "ranks": 2, **changes}


def store(tmp_path, model, **changes) -> Backend:
    config = StorageConfig(backend="file", directory=str(tmp_path), **changes)
    backend = make_backend(config, model, PRINT, SIZE)
    assert backend is not None
    return backend


async def write(tmp_path, **identity) -> None:
    backend, arena = store(tmp_path, **identity), Arena(1, SIZE)
    await backend.open()
    arena.view(0)[:] = np.full(SIZE, 3, np.uint8).data
    assert (await backend.write([KEY], [arena.view(0)], never)).outcomes == bytes([Outcome.OK])
    await backend.close()
    arena.close()


async def hit(tmp_path, **identity) -> bool:
    """Whether the object can be read. A store that refuses to open serves nothing."""
    backend, arena = store(tmp_path, **identity), Arena(1, SIZE)
    try:
        await backend.open()
    except StoreError:
        arena.close()
        return False
    report = await backend.read([KEY], [arena.view(0)], never)
    await backend.close()
    arena.close()
    return report.outcomes == bytes([Outcome.OK])


@pytest.mark.parametrize(
    "change", [{"model": "other"}, {"namespace": "other"}, {"rank": 1}, {"ranks": 4}]
)
async def test_an_object_of_another_identity_is_a_miss_also_in_a_folder_that_was_renamed(
    tmp_path, change
):
    await write(tmp_path, **fields())
    assert await hit(tmp_path, **fields())
    assert not await hit(tmp_path, **fields(**change))
    mine, other = (StoreIdentity(fingerprint=PRINT, **one) for one in (fields(), fields(**change)))
    shutil.rmtree(other.folder(tmp_path), ignore_errors=True)
    other.folder(tmp_path).parent.mkdir(parents=True, exist_ok=True)
    mine.folder(tmp_path).rename(other.folder(tmp_path))
    assert not await hit(tmp_path, **fields(**change)), (
        "the headers carry the identity, not the folder alone"
    )


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
