"""File stores for tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import xxhash

from kvactors.actor import Actor
from kvactors.device.arena import Arena
from kvactors.settings import Config
from kvactors.storage.file.store import FileBackend
from kvactors.storage.file.table import Meta, blank_entry
from kvactors.storage.messages import Outcome
from kvactors.testing.store_contract import Bench
from tests.support import cache as support

SIZE, PRINT = 5000, bytes(range(32))
OK, MISS, CORRUPT = Outcome.OK, Outcome.MISS, Outcome.CORRUPT


@asynccontextmanager
async def opened(
    folder: Path, capacity: int = 0, *, print_: bytes = PRINT, size: int = SIZE, **options
):
    store, arena = FileBackend(folder, print_, size, capacity, **options), Arena(64, size)
    await store.open()
    try:
        await store.attach(arena)
        yield Bench(store, arena)
    finally:
        await store.close()
        arena.close()


class Hang:
    """A call of a store's thread that begins and does not end before `go`: of those with given
    arguments, or the first one."""

    def __init__(self, when=lambda *_: True) -> None:
        self.when = when
        self.entered, self.go = threading.Event(), threading.Event()

    def __call__(self, *call) -> None:
        if self.when(*call):
            self.entered.set()
            self.go.wait(60)

    async def begun(self) -> None:
        while not self.entered.is_set():
            await asyncio.sleep(0.001)


def whole(store: FileBackend) -> None:
    """Every slot is free or holds an object, and every name has one."""
    assert set(store.catalog) == set(store.objects)
    assert not store.pending
    used = [slot for slot, _ in store.objects.values()]
    total = len(store.files.slabs) * store.files.meta.slots_per_slab
    assert sorted(used + list(store.supply.free)) == list(range(total))


@contextmanager
def at_step(store: FileBackend, step: int, action) -> Iterator[list[int]]:
    """Await `action()` before the call of a thread with this number. Yields the number of calls."""
    calls, io = [0], store.io
    steps = ("run", "_job", "seal", "erase")

    def stepwise(call):
        async def counted(*args, **options):
            calls[0] += 1
            if calls[0] == step:
                await action()
            return await call(*args, **options)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        for name in steps:
            patch.setattr(io, name, stepwise(getattr(io, name)))
        yield calls


def after_each_message(monkeypatch, kind: type[Actor], call) -> None:
    """Call `call(actor, to, message)` after each message that an actor of a class sends."""
    init = kind.__init__

    def recording_init(actor, *args, **options):
        init(actor, *args, **options)
        tell = actor.tell

        def recording(to, message):
            tell(to, message)
            call(actor, to, message)

        actor.tell = recording

    monkeypatch.setattr(kind, "__init__", recording_init)


def cached_config(*sinks: dict, **storage) -> Config:
    """Of a small cache whose finished requests are written through."""
    return Config.from_mapping(
        {
            "cache": {"model": "m", "block_size": 4, "default_deadline_s": 60.0},
            "device": {"num_blocks": 16},
            "host": {"slots": 8, "transit_slots": 200},
            "layout": {"num_layers": 2, "num_kv_heads": 1, "head_dim": 8},
            "storage": {"backend": "file", "write_policy": "write_through", **storage},
            "flush": {"sinks": list(sinks)},
        }
    )


async def serve(cache, seed: int, *, save: bool = True):
    """Serve one request of four full blocks, verified. Returns its hits by tier. save: finish it,
    so that it is written to the store."""
    if save:
        return (await support.serve(cache, f"r{seed}", [seed] * 17)).hits
    async with await cache.acquire(f"r{seed}", [seed] * 17) as lease:
        await lease.wait_ready()
    return lease.hits


def entry_of(
    meta: Meta,
    key: bytes,
    checksum: int,
    sequence: int,
    generation: int,
    metadata: Mapping[int, bytes] | None = None,
) -> bytes:
    """A slot's entry. Fields of metadata that do not fit are left out, the last ones first."""
    blank = blank_entry(meta, key, sequence, generation, metadata)
    body = blank[:88] + checksum.to_bytes(8, "little") + blank[96:-8]
    return body + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
