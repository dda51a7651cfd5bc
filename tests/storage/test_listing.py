"""A whole store is listed in parts, between which it may change."""

from __future__ import annotations

from hashlib import sha256

from kvactors.storage.actors import ReportPages
from kvactors.storage.guarded import CheckedBackend
from kvactors.storage.memory import MemoryBackend
from kvactors.types import split_hashes

COUNT = 20_000


def key(number: int) -> bytes:
    return sha256(number.to_bytes(4, "little")).digest()


def held() -> tuple[MemoryBackend, CheckedBackend]:
    store = MemoryBackend(bytes(32), 8)
    store.catalog.admit([key(number) for number in range(COUNT)])
    return store, CheckedBackend(store, 1.0)


def test_a_page_lists_only_a_part_of_the_store():
    store, checked = held()
    store.keys = store.iter_keys = None  # neither is used
    listed = checked.inventory.snapshot()
    next(listed)
    sizes = [len(part) for part in store.inventory.key_slices()]
    assert sum(sizes) == COUNT
    assert max(sizes) < COUNT / 50


def test_a_key_that_stays_is_reported_while_others_change():
    store, checked = held()
    pages = ReportPages(checked.inventory)
    pages.restart()
    found: set[bytes] = set()
    number, removed = COUNT, 0
    while (page := pages.next()) is not None:
        found.update(split_hashes(page.held))
        if not page.held:
            continue
        store.catalog.remove([key(removed)])
        store.catalog.admit([key(number)])
        store.catalog.run([key(number // 2)])
        number, removed = number + 1, removed + 1
    assert found >= {key(one) for one in range(removed, COUNT)}
    assert removed > 10


def test_parts_are_what_the_store_holds():
    store, _ = held()
    store.catalog.capacity = 100
    store.catalog.admit([key(COUNT)])
    store.catalog.evict(())
    store.pending.add(key(COUNT))
    listed = [one for part in store.inventory.key_slices() for one in part]
    assert len(listed) == len(set(listed)) == 98
    assert set(listed) == set(store.keys())
    store.catalog.clear()
    assert not any(store.inventory.key_slices())
