"""File stores for tests."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path

from kvactors.device.arena import Arena
from kvactors.storage.backends import FileBackend
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import Bench

SIZE, PRINT = 5000, bytes(range(32))
OK, MISS, CORRUPT = Outcome.OK, Outcome.MISS, Outcome.CORRUPT


@asynccontextmanager
async def opened(folder: Path, capacity: int = 0, *, print_: bytes = PRINT, size: int = SIZE, **options):
    store, arena = FileBackend(folder, print_, size, capacity, **options), Arena(64, size)
    await store.open()
    try:
        await store.attach(arena)
        yield Bench(store, arena)
    finally:
        await store.close()
        arena.close()


def whole(store: FileBackend) -> None:
    """Every slot is free or holds an object, and every name has one."""
    assert set(store.catalog.keys()) == set(store._objects)
    assert not store._written
    assert not store.pending
    used = [slot for slot, _ in store._objects.values()]
    total = len(store.files.slabs) * store.files.meta.slots_per_slab
    assert sorted(used + list(store.slots.free)) == list(range(total))
