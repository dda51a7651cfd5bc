"""Stores and saves of more blocks than host slots: windows, bounds, fair shares, and what is shed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvactors.tier_cache import Lookup, StoreSlots, TierCache
from tests.tier_cache.helpers import (
    KEYS,
    LIMIT,
    Clock,
    answer,
    load,
    make,
    on_disk,
    payload,
    settle,
)
from tests.tier_cache.helpers import store as store_all
from tests.tier_cache.stores import FaultyStore

BACKEND = f"{FaultyStore.__module__}:{FaultyStore.__name__}"


@pytest.fixture(autouse=True)
def mode() -> Iterator[None]:
    FaultyStore.mode = "ok"
    yield
    FaultyStore.mode = "ok"


def faulty(num_slots: int, clock: Clock, **storage: object) -> TierCache:
    return make(
        num_slots, clock=clock, storage={"backend": BACKEND, "timeout_s": 1000.0, **storage}
    )


def path(number: int, blocks: int) -> list[bytes]:
    return [bytes([number, i % 256, i // 256]) * 12 for i in range(blocks)]


def copy(cache: TierCache, found: StoreSlots) -> None:
    for key, slot in zip(found.keys, found.slots, strict=True):
        cache.memory.view(slot)[:] = payload(key)


def store_paths(cache: TierCache, paths: list[list[bytes]]) -> None:
    """Store paths at once as an engine does: each is offered in every step until no key waits, and
    copies end a step later."""
    until = time.monotonic() + LIMIT
    left = {number: tuple(keys) for number, keys in enumerate(paths)}
    parents = {
        key: above for keys in paths for above, key in zip([None, *keys], keys, strict=False)
    }
    copied: list[bytes] = []
    while left:
        assert time.monotonic() < until, "stores do not end"
        cache.complete_store(copied)
        copied = []
        for number, keys in list(left.items()):
            found = cache.prepare_store(keys, [parents[key] for key in keys])
            copy(cache, found)
            copied += found.keys
            left[number] = found.waiting
            if not found.waiting:
                del left[number]
        cache.end_step()
    cache.complete_store(copied)


@pytest.mark.parametrize("num_slots", [64, 3])
def test_every_block_is_saved_however_few_slots_there_are(tmp_path, num_slots):
    cache = on_disk(tmp_path, num_slots, capacity_blocks=1000, on_full_wait_s=LIMIT)
    paths = [path(number, 15) for number in range(24)]
    store_paths(cache, paths)
    settle(cache)
    found = cache.statistics()
    assert (found.stored_objects, found.saved) == (360, 360)
    assert (found.refused_stores, found.unsaved, found.pinned) == (0, 0, 0)
    cache.check()
    for key in (paths[0][0], paths[23][14]):
        assert answer(cache, key) is Lookup.HIT
        assert load(cache, key) == payload(key)
    cache.shutdown()


def test_a_path_longer_than_the_host_tier_keeps_its_first_blocks_without_storage():
    cache = make(4)
    keys = path(0, 10)
    store_paths(cache, [keys])
    assert [cache.lookup(key) for key in keys[:5]] == [Lookup.HIT] * 4 + [Lookup.MISS]
    assert cache.statistics().refused_stores == 6
    cache.shutdown()


def test_write_back_evicts_no_block_before_it_is_saved(tmp_path):
    cache = on_disk(
        tmp_path, 8, capacity_blocks=1000, write_policy="write_back", on_full_wait_s=LIMIT
    )
    paths = [path(number, 5) for number in range(10)]
    store_paths(cache, paths)
    settle(cache)
    found = cache.statistics()
    assert (found.refused_stores, found.unsaved) == (0, 0)
    for key in (key for keys in paths for key in keys):
        assert answer(cache, key) is Lookup.HIT
    cache.shutdown()


def test_stores_wait_for_a_bounded_time_and_are_counted():
    clock = Clock()
    cache = faulty(2, clock, on_full_wait_s=2.0)
    FaultyStore.mode = "hold"
    assert store_all(cache, KEYS[:2])
    cache.end_step()
    seen = []
    for _ in range(4):
        found = cache.prepare_store(KEYS[2:4])
        seen.append((len(found.keys), len(found.waiting), len(found.refused)))
        clock.now += 0.9
        cache.end_step()
    # after two seconds one block is evicted unsaved, and the other is still being written
    assert seen == [(0, 2, 0), (0, 2, 0), (0, 2, 0), (1, 0, 1)]
    found = cache.statistics()
    assert (found.unsaved, found.refused_stores) == (1, 1)
    FaultyStore.mode = "ok"
    cache.complete_store([KEYS[2]])
    settle(cache)
    cache.check()
    cache.shutdown()


def test_with_shed_nothing_waits():
    cache = faulty(2, Clock(), on_full="shed")
    FaultyStore.mode = "hold"
    assert store_all(cache, KEYS[:2])
    cache.end_step()
    found = cache.prepare_store(KEYS[2:4])
    assert (len(found.keys), found.waiting, found.refused) == (1, (), (KEYS[3],))
    assert cache.statistics().unsaved == 1
    FaultyStore.mode = "ok"
    cache.complete_store([KEYS[2]])
    settle(cache)
    cache.shutdown()


def test_a_block_that_was_not_saved_is_saved_when_it_is_offered_again():
    cache = faulty(4, Clock())
    FaultyStore.mode = "raise"
    assert store_all(cache, KEYS[:1])
    settle(cache)
    assert cache.statistics().failed_saves == 1
    FaultyStore.mode = "ok"
    settle(cache)
    assert cache.statistics().saved == 0
    assert cache.prepare_store(KEYS[:1]).keys == ()
    settle(cache)
    assert cache.statistics().saved == 1
    cache.shutdown()


def test_look_ups_get_slots_before_stores():
    cache = faulty(4, Clock(), on_full_wait_s=LIMIT, slot_timeout_s=LIMIT)
    assert store_all(cache, KEYS[:4])
    settle(cache)
    cache.reset()
    first = cache.prepare_store(KEYS[10:14])
    assert [cache.lookup(key) for key in KEYS[:4]] == [Lookup.PENDING] * 4
    assert cache.prepare_store(KEYS[20:24]).waiting == tuple(KEYS[20:24])
    cache.complete_store(first.keys, success=False)
    cache.end_step()
    assert cache.prepare_store(KEYS[20:24]).waiting == tuple(KEYS[20:24])
    assert [answer(cache, key) for key in KEYS[:4]] == [Lookup.HIT] * 4
    settle(cache)
    cache.check()
    cache.shutdown()


def test_a_long_store_leaves_slots_to_short_ones():
    cache = faulty(8, Clock(), on_full_wait_s=LIMIT)
    long, short = path(0, 1000), path(1, 2)
    first = cache.prepare_store(long)
    assert len(first.keys) == 8
    assert cache.prepare_store(short).waiting == tuple(short)
    cache.complete_store(first.keys, success=False)
    cache.end_step()
    second = cache.prepare_store(first.waiting)
    assert len(second.keys) == 4
    last = cache.prepare_store(short)
    assert last.keys == tuple(short)
    cache.complete_store(second.keys + last.keys, success=False)
    cache.shutdown()
