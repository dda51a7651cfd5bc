"""A worker over a store, without LMCache: keys, memory and a receiver of results."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvactors.integrations.lmcache.catalog import Key, KeyCatalog, KeyFile, ObjectShape
from kvactors.integrations.lmcache.object_store import Buffer, ObjectStore, TransferTask
from kvactors.integrations.page_store import PageStore
from kvactors.tier_cache import StorageTier, open_storage
from tests.tier_cache.stores import FaultyStore

PAGE = 4096
SIZE = 10_000
"""Bytes of an object: two pages and a part of a third one."""
LAYOUT = "float16[2,50,50]"
LIMIT = 60.0
"""Seconds that a wait may take. It only bounds a hang."""

KEYS = [Key(bytes([i]) * 32, "m", 0x01000100, 0, "") for i in range(64)]


def salted(salt: str) -> list[Key]:
    """The same chunks of another tenant."""
    return [key._replace(cache_salt=salt) for key in KEYS]


def payload(key: Key, size: int = SIZE) -> bytes:
    """The bytes of a key's object."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return (digest * (size // 32 + 1))[:size]


class Memory:
    """Memory of LMCache for one object."""

    def __init__(self, data: bytes = bytes(SIZE), layout: str = LAYOUT) -> None:
        self.bytes = ctypes.create_string_buffer(data, len(data))
        self.buffer = Buffer(
            ObjectShape(layout, len(data)), ctypes.addressof(self.bytes), self.bytes
        )


class World:
    """A worker and what it reports.

    Args:
        tier: the store.
        folder: for the file of the keys.
        capacity: pages of the catalog.
        timeout: seconds of a task.
    """

    def __init__(
        self, tier: StorageTier, folder: Path, capacity: int = 1000, timeout: float = LIMIT
    ) -> None:
        self.tier = tier
        self.timeout = timeout
        self.changes: list[tuple[str, list[Any], list[int]]] = []
        self.results: dict[int, TransferTask] = {}
        self.lookups: dict[int, list[bool]] = {}
        self._numbers = itertools.count()
        self._arrived = threading.Event()
        self.keys = KeyFile(folder / "keys.jsonl")
        self.keys.read()
        self.keys.rewrite([])
        pages = PageStore(tier, tier.block_bytes, timeout, buffer_bytes=2 * tier.block_bytes)
        self.objects = ObjectStore(pages, self.keys, KeyCatalog(capacity), self)

    # -- the receiver

    def task_ended(self, task: TransferTask) -> None:
        assert task.number not in self.results, "a task ended twice"
        self.results[task.number] = task
        self._arrived.set()

    def looked_up(self, number: int, found: list[bool]) -> None:
        self.lookups[number] = found
        self._arrived.set()

    def stored(self, keys: list[Any], sizes: list[int]) -> None:
        self.changes.append(("stored", keys, sizes))
        self._arrived.set()

    def accessed(self, keys: list[Any]) -> None:
        self.changes.append(("accessed", keys, []))

    def deleted(self, keys: list[Any], sizes: list[int]) -> None:
        self.changes.append(("deleted", keys, sizes))
        self._arrived.set()

    # -- calls

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until the worker has reported something that makes `done` true."""
        until = time.monotonic() + LIMIT
        while not done():
            self._arrived.clear()
            if not done():
                assert self._arrived.wait(max(0.0, until - time.monotonic())), "no result"

    def submit(
        self, keys: Sequence[Key], memory: Sequence[Memory | None], *, save: bool
    ) -> TransferTask:
        buffers = [None if each is None else each.buffer for each in memory]
        deadline = time.monotonic() + self.timeout
        task = TransferTask(next(self._numbers), list(keys), buffers, deadline, save=save)
        self.objects.post(partial(self.objects.begin, task))
        return task

    def store(self, keys: Sequence[Key], layout: str = LAYOUT) -> list[bool]:
        """Store the payloads of keys. Returns whether each is stored."""
        memory = [Memory(payload(key), layout) for key in keys]
        task = self.submit(keys, memory, save=True)
        self.wait(lambda: task.number in self.results)
        return task.ok

    def load(self, keys: Sequence[Key], layout: str = LAYOUT) -> list[bytes | None]:
        """Load keys. Returns the bytes of each that was loaded."""
        memory = [Memory(layout=layout) for _ in keys]
        task = self.submit(keys, memory, save=False)
        self.wait(lambda: task.number in self.results)
        return [each.bytes.raw if ok else None for each, ok in zip(memory, task.ok, strict=True)]

    def look_up(
        self, keys: Sequence[Key], layout: str | None = LAYOUT, states: str | None = None
    ) -> list[bool]:
        """Look keys up. Those that are found stay locked. `states`: layout of the object group 1."""
        number = next(self._numbers)
        layouts = {i: one for i, one in enumerate((layout, states)) if one is not None}
        self.objects.post(partial(self.objects.look_up, number, list(keys), layouts))
        self.wait(lambda: number in self.lookups)
        return self.lookups[number]

    def held(self, keys: Sequence[Key], layout: str | None = LAYOUT) -> list[bool]:
        """Look keys up and unlock them."""
        found = self.look_up(keys, layout)
        hits = [key for key, there in zip(keys, found, strict=True) if there]
        self.objects.post(partial(self.objects.unlock, hits))
        return found

    def check(self) -> None:
        """The catalog agrees with the store and with the reported changes, and nothing is in
        flight."""

        def inside() -> None:
            catalog = self.objects.catalog
            items = catalog.items()
            assert catalog.used == sum(found.pages for _, found in items) <= catalog.capacity
            assert catalog.nbytes == sum(found.shape.size for _, found in items)
            assert catalog.reserved == 0
            assert not self.objects.tasks
            assert all(self.tier.contains(page) for _, found in items for page in found.page_keys())
            there: dict[Any, int] = {}
            for change, keys, sizes in self.changes:
                for key, size in zip(keys, sizes, strict=False):
                    if change == "stored":
                        assert key not in there, "stored twice"
                        there[key] = size
                    elif change == "deleted":
                        assert there.pop(key) == size
            assert there == {key: found.shape.size for key, found in items}

        self.objects.ask(inside, LIMIT, None)

    def close(self) -> None:
        assert self.objects.stop(LIMIT)
        self.tier.close()
        self.keys.close()


def open_files(folder: Path, pages: int = 1000) -> StorageTier:
    """A file store."""
    storage = {
        "backend": "file",
        "directory": str(folder),
        "capacity_blocks": pages,
        "free_space_floor": 0,
        "timeout_s": LIMIT,
    }
    config = {"model": "lmcache", "block_bytes": PAGE, "num_slots": 1, "storage": storage}
    return open_storage(config)


def open_faulty(timeout: float = LIMIT) -> StorageTier:
    """A store that hangs or fails on demand."""
    FaultyStore.mode = "ok"
    backend = f"{FaultyStore.__module__}:{FaultyStore.__name__}"
    storage = {"backend": backend, "timeout_s": timeout}
    config = {"model": "lmcache", "block_bytes": PAGE, "num_slots": 1, "storage": storage}
    return open_storage(config)
