"""Faults of a file store behind a whole cache: misses, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from kvactors.testing.faults import corrupt_objects
from tests.support.cache import opened, prompt, serve
from tests.support.slab_calls import failing, faults

PROMPTS, BLOCKS = 12, 6
HOST = {"slots": 4, "transit_slots": 32}


class Fault(NamedTuple):
    """begin: causes the fault, and may return a context during which it lasts. counter: of the
    store or the host, which must count it. exclusive: of the store, so that every eviction writes
    again."""

    begin: object
    counter: str
    exclusive: bool = False


def store_of(cache):
    return cache.system.backend


def flip_bits(cache, monkeypatch):
    assert corrupt_objects(store_of(cache), 3) > 0


def truncate(share):
    def cut(cache, monkeypatch):
        files = store_of(cache).files
        used = PROMPTS * BLOCKS * files.meta.stride
        os.truncate(files.folder / "slab-0000", int(used * share))

    return cut


def delete_folder(cache, monkeypatch):
    shutil.rmtree(store_of(cache).files.folder)


def refuse_writes(number):
    def refuse(cache, monkeypatch):
        context = faults(store_of(cache), write=failing(number))
        context.__enter__()
        return context

    return refuse


FAULTS = {
    "one bit flipped in every third object": Fault(flip_bits, "corrupt"),
    "file cut in half": Fault(truncate(0.5), "corrupt"),
    "file empty": Fault(truncate(0.0), "corrupt"),
    "folder deleted": Fault(delete_folder, "misses"),
    "disk full": Fault(refuse_writes(errno.ENOSPC), "no_space", exclusive=True),
    "read-only file system": Fault(refuse_writes(errno.EROFS), "unavailable", exclusive=True),
}


def stored(folder: Path, **storage):
    return {"backend": "file", "directory": str(folder), "write_policy": "write_through", **storage}


async def serve_all(cache, *, settle=True):
    """Serve every prompt once and verify each loaded block. Returns the blocks found in the
    store."""
    found = 0
    for seed in range(PROMPTS):
        lease = await serve(cache, f"r{seed}", prompt(seed, BLOCKS, tail=1))
        found += lease.hits.storage
        if settle:
            await cache.wait_idle(20.0)
    return found


@pytest.mark.parametrize("name", FAULTS)
async def test_a_fault_of_the_store_costs_misses_and_is_counted(name, tmp_path, monkeypatch):
    fault = FAULTS[name]
    storage = stored(tmp_path, exclusive=fault.exclusive)
    async with opened(device=16, host=HOST, storage=storage) as cache:
        await serve_all(cache)
        context = fault.begin(cache, monkeypatch)
        try:
            await serve_all(cache)
        finally:
            if context is not None:
                context.__exit__(None, None, None)
        await serve_all(cache)
        statistics = cache.statistics()
        assert getattr(statistics.store, fault.counter, 0) or getattr(
            statistics.host, fault.counter, 0
        )


async def test_exhausted_staging_memory_costs_misses_only(tmp_path):
    host = {"slots": 2, "transit_slots": 2}
    async with opened(device=16, host=host, storage=stored(tmp_path)) as cache:
        for _ in range(3):
            await serve_all(cache)
