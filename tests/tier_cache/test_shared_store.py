"""Stores that list no objects: look-ups ask them."""

from __future__ import annotations

import pytest

from kvactors.tier_cache import Lookup, TierCache
from kvactors.tier_cache.cache import ABSENT
from kvactors.tier_cache.storage import make_storage
from tests.tier_cache.helpers import (
    KEYS,
    LIMIT,
    Clock,
    alone,
    answer,
    load,
    make,
    payload,
    settle,
    store,
)
from tests.tier_cache.stores import SharedStore

BACKEND = f"{SharedStore.__module__}:{SharedStore.__name__}"


@pytest.fixture(autouse=True)
def empty():
    SharedStore.pool.clear()
    SharedStore.asked.clear()
    SharedStore.mode = "ok"
    yield
    SharedStore.mode = "ok"


def shared(num_slots: int = 8, clock: Clock | None = None, **storage: object) -> TierCache:
    return make(num_slots, clock=clock, storage={"backend": BACKEND, **storage})


def test_objects_of_an_earlier_process_and_of_others_are_found():
    cache = shared()
    store(cache, KEYS[:3])
    settle(cache)
    cache.shutdown()
    cache, other = shared(), shared()
    assert not cache.health().reasons
    assert cache.lookup(KEYS[0]) is Lookup.PENDING
    assert answer(cache, KEYS[0]) is Lookup.HIT
    assert load(cache, KEYS[0]) == payload(KEYS[0])
    assert answer(cache, KEYS[9]) is Lookup.MISS
    store(other, KEYS[9:10])
    settle(other)
    cache.shutdown()
    cache = shared()
    assert answer(cache, KEYS[9]) is Lookup.HIT
    cache.check()
    for one in (cache, other):
        one.shutdown()


def test_the_keys_of_a_step_are_asked_about_together_and_of_each_path():
    """A missing block of one request does not hide those of another."""
    clock = Clock()
    cache = shared(clock=clock)
    store(cache, KEYS[4:6])
    settle(cache)
    cache.reset()
    cache.shutdown()
    cache = shared(clock=clock)
    for key in KEYS[:6]:
        assert cache.lookup(key) is Lookup.PENDING
    settle(cache)
    tier = make_storage(cache.config)
    assert [tier.name_of(key) for key in KEYS[:6]] == SharedStore.asked
    assert [cache.lookup(key) for key in KEYS[:6]] == [Lookup.MISS] * 4 + [Lookup.PENDING] * 2
    assert [answer(cache, key) for key in KEYS[4:6]] == [Lookup.HIT] * 2
    assert len(SharedStore.asked) == 6, "an answer was not used again"
    clock.now += ABSENT + 0.1
    assert cache.lookup(KEYS[0]) is Lookup.PENDING, "an absent key is never asked about again"
    settle(cache)
    cache.shutdown()


def test_a_store_that_does_not_answer_a_look_up_costs_a_miss():
    clock = Clock()
    cache = shared(clock=clock, timeout_s=5.0, close_timeout_s=0.1)
    cache.start()
    SharedStore.mode = "hang"
    assert cache.lookup(KEYS[0]) is Lookup.PENDING
    cache.end_step()
    assert cache.lookup(KEYS[0]) is Lookup.PENDING
    clock.now += 6.1
    cache.end_step()
    assert cache.lookup(KEYS[0]) is Lookup.MISS
    assert cache.health().status == "degraded"
    SharedStore.mode = "ok"
    settle(cache)
    cache.shutdown()


def test_an_object_that_the_pool_has_evicted_is_a_miss_and_is_stored_again():
    clock = Clock()
    cache = shared(clock=clock)
    store(cache, KEYS[:1])
    settle(cache)
    cache.reset()
    SharedStore.pool.clear()
    assert answer(cache, KEYS[0]) is Lookup.MISS
    assert store(cache, KEYS[:1])
    settle(cache)
    assert len(SharedStore.pool) == 1
    cache.shutdown()


def test_a_storage_tier_looks_keys_up():
    tier = alone(backend=BACKEND)
    assert not tier.lists
    view = memoryview(payload(KEYS[1]))
    assert tier.submit_store("s", [KEYS[1]], [view]).result(LIMIT).ok == (True,)
    tier.close()
    tier = alone(backend=BACKEND)
    assert not tier.contains(KEYS[1])
    looking = tier.submit_lookup("l", KEYS[:3])
    looking.cancel()
    found = looking.result(LIMIT)
    assert (found.kind, found.ok, found.nbytes) == ("lookup", (False, True, False), 0)
    assert [one.job for one in tier.poll()] == ["l"]
    assert [tier.contains(key) for key in KEYS[:3]] == [False, True, False]
    tier.close()
