"""A batch of a store in memory lets other tasks run."""

import asyncio

from kvactors.storage import local_store
from kvactors.storage.memory import MemoryBackend


async def runs_beside(batch):
    """Await a batch. Returns how often another task ran since its start."""
    count, ended = 0, False

    async def other():
        nonlocal count
        while not ended:
            count += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    try:
        await batch
    finally:
        ended = True
        await task
    return count


async def test_objects_are_moved_in_slices(monkeypatch):
    monkeypatch.setattr(local_store, "SLICE", -1.0)  # every object ends a slice
    store, count = MemoryBackend(b"", 4), 64
    keys = [number.to_bytes(32, "big") for number in range(count)]
    views = [memoryview(bytearray(4)) for _ in keys]
    assert await runs_beside(store.write(keys, views, lambda: False)) >= count
    assert await runs_beside(store.read(keys, views, lambda: False)) >= count
