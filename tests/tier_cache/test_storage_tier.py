"""`StorageTier` by itself, and stores that hang or fail under a `TierCache`."""

from __future__ import annotations

import threading
import time

import pytest

from kvactors import CacheClosed, ConfigError
from kvactors.storage import attempts
from kvactors.storage.local_store import LocalStore
from kvactors.tier_cache import Lookup, StorageTier, TierCache, storage
from kvactors.tier_cache import cache as cache_module
from kvactors.tier_cache.storage import make_storage
from tests.tier_cache.helpers import (
    BLOCK,
    KEYS,
    LIMIT,
    alone,
    answer,
    load,
    make,
    payload,
    settle,
    store,
)
from tests.tier_cache.stores import FaultyStore

BACKEND = f"{FaultyStore.__module__}:{FaultyStore.__name__}"


def faulty(**storage: object) -> TierCache:
    FaultyStore.mode = "ok"
    return make(8, storage={"backend": BACKEND, **storage})


@pytest.fixture(autouse=True)
def ok():
    yield
    FaultyStore.mode = "ok"
    FaultyStore.unreadable = set()


def test_a_fetch_that_hangs_is_a_miss_and_its_slot_stays_withheld(monkeypatch):
    cache = faulty(timeout_s=0.1)
    store(cache, KEYS[:2])
    settle(cache)
    cache.reset()
    FaultyStore.mode = "hang"
    assert cache.lookup(KEYS[0]) is Lookup.PENDING
    assert answer(cache, KEYS[0]) is Lookup.MISS
    assert cache.statistics().pinned == 1
    assert cache.health().status == "degraded"
    assert not store(cache, KEYS[10:18]), "the slot of a read in flight was handed out"
    FaultyStore.mode = "ok"
    settle(cache)
    assert cache.statistics().pinned == 0
    assert answer(cache, KEYS[1]) is Lookup.HIT
    cache.check()
    cache.shutdown()


def test_a_store_that_fails_costs_misses_only_and_recovers(monkeypatch):
    monkeypatch.setattr(cache_module, "RETRY", 1000.0)
    cache = faulty()
    store(cache, KEYS[:7])
    settle(cache)
    cache.reset()
    FaultyStore.mode = "raise"
    for key in KEYS[:6]:
        assert answer(cache, key) is Lookup.MISS
    assert cache.statistics().failed_fetches == 5, "a paused store is not asked"
    health = cache.health()
    assert health.status == "degraded"
    assert "storage" in health.reasons[0]
    assert cache.lookup(KEYS[6]) is Lookup.MISS, "a store that fails is asked again and again"
    assert store(cache, KEYS[20:22])
    settle(cache)
    assert cache.statistics().failed_saves == 2
    cache.check()
    cache.shutdown()


def test_writes_that_fail_degrade_health_while_reads_work(monkeypatch):
    monkeypatch.setattr(attempts, "PAUSE_S", 0.0)
    cache = faulty()
    store(cache, KEYS[:1])
    settle(cache)
    FaultyStore.mode = "unwritable"
    for key in KEYS[1:8]:
        cache.reset()
        assert answer(cache, KEYS[0]) is Lookup.HIT, "failing writes stop no load"
        store(cache, [key])
        settle(cache)
    (reason,) = cache.health().reasons
    assert "storage: no write has worked" in reason
    assert "the disk is gone" in reason
    assert cache.statistics().failed_saves == 7
    FaultyStore.mode = "ok"
    store(cache, KEYS[8:9])
    settle(cache)
    assert cache.health().status == "ok"
    cache.shutdown()


def test_no_request_waits_for_an_object_that_cannot_be_read(monkeypatch):
    """The store works for the others, so that its circuit breaker stays closed."""
    monkeypatch.setattr(cache_module, "RETRY", 1000.0)
    cache = faulty()
    store(cache, KEYS[:4])
    settle(cache)
    cache.reset()
    FaultyStore.unreadable = {make_storage(cache.config).name_of(KEYS[0])}
    assert cache.lookup(KEYS[0]) is Lookup.PENDING
    assert answer(cache, KEYS[0]) is Lookup.MISS
    assert cache.lookup(KEYS[0]) is Lookup.MISS
    assert answer(cache, KEYS[1]) is Lookup.HIT
    assert store(cache, KEYS[:1])
    assert cache.lookup(KEYS[0]) is Lookup.HIT
    cache.shutdown()


def test_a_fetched_key_is_spared_until_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(cache_module, "AWAITED", 1000.0)
    cache = make(1, storage={"backend": "memory"})
    for key in KEYS[:2]:
        store(cache, [key])
        settle(cache)
    cache.reset()
    assert cache.lookup(KEYS[0]) is Lookup.PENDING
    settle(cache)
    assert cache.lookup(KEYS[1]) is Lookup.PENDING
    settle(cache)
    assert cache.statistics().evicted == 1, "two requests evict each other's fetches"
    assert cache.lookup(KEYS[0]) is Lookup.HIT
    assert load(cache, KEYS[0]) == payload(KEYS[0])
    cache.end_step()
    assert answer(cache, KEYS[1]) is Lookup.HIT
    cache.shutdown()


def open_file(folder: object) -> StorageTier:
    return alone(backend="file", directory=str(folder), capacity_blocks=8)


def test_jobs_of_several_threads_with_scatter_lists(tmp_path):
    tier = open_file(tmp_path)
    data = bytearray(payload(KEYS[0]) + payload(KEYS[1]))
    views = memoryview(data)
    tier.submit_store("a", KEYS[:1], [views[:BLOCK]])
    tier.submit_store("b", KEYS[1:2], [[views[BLOCK : BLOCK + 32], views[BLOCK + 32 :]]])
    assert tier.drain(LIMIT)
    assert {result.job: result.ok for result in tier.poll()} == {"a": (True,), "b": (True,)}
    assert tier.contains(KEYS[0])
    assert not tier.contains(KEYS[2])
    found: list[bytes] = []

    def read(i: int) -> None:
        parts = [memoryview(bytearray(40)), memoryview(bytearray(BLOCK - 40))]
        tier.submit_load(("load", i), [KEYS[i]], [parts])
        assert tier.drain(LIMIT)
        found.append(b"".join(parts))

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(payload(key) for key in KEYS[:2])
    assert all(result.ok == (True,) and not result.saved for result in tier.poll())
    tier.close()


def test_a_wrong_view_fails_its_key_only(tmp_path):
    tier = open_file(tmp_path)
    whole = memoryview(bytearray(payload(KEYS[1])))
    wrong = [memoryview(b""), whole[:-1], [whole, whole[:1]], whole[::2], 7]
    tier.submit_store(1, [KEYS[0]] * 5 + [KEYS[1]], [*wrong, whole])  # type: ignore[list-item]
    assert tier.drain(LIMIT)
    (result,) = tier.poll()
    assert result.ok == (False,) * 5 + (True,)
    assert result.nbytes == BLOCK
    assert not tier.contains(KEYS[0])
    tier.submit_load(2, [KEYS[1], KEYS[1]], [memoryview(bytes(BLOCK)), whole])
    assert tier.drain(LIMIT)
    assert tier.poll()[0].ok == (False, True), "memory that cannot be written was read into"
    with pytest.raises(ValueError, match="1 views of 2 keys"):
        tier.submit_store(3, KEYS[:2], [whole])
    tier.close()


def test_evicted_keys_are_reported_and_cleared_ones_stay_away(tmp_path):
    tier = open_file(tmp_path)
    views = [memoryview(payload(key)) for key in KEYS[:12]]
    for i in range(12):
        tier.submit_store(i, [KEYS[i]], [views[i]])
        assert tier.drain(LIMIT)
    removed = [key for result in tier.poll() for key in result.removed]
    assert removed == KEYS[:4]
    assert tier.objects == 8
    assert set(tier.clear()) == set(KEYS[4:12])
    assert not tier.contains(KEYS[11])
    tier.close()
    again = open_file(tmp_path)
    assert again.objects == 0
    again.close()


@pytest.mark.parametrize("lists", [True, False])
def test_a_job_of_before_a_clear_makes_no_key_known(lists, monkeypatch):
    monkeypatch.setattr(LocalStore, "is_complete", lists)
    FaultyStore.mode = "hold"
    tier = alone(backend=BACKEND, timeout_s=LIMIT)
    assert tier.lists is lists
    tier.submit_store("before", KEYS[:2], [memoryview(payload(key)) for key in KEYS[:2]])
    assert tier.clear() == []
    FaultyStore.mode = "ok"
    assert tier.drain(LIMIT)
    until = time.monotonic() + LIMIT
    while tier.clearing and time.monotonic() < until:
        time.sleep(0.001)
    assert [tier.contains(key) for key in KEYS[:2]] == [False, False]
    tier.submit_store("after", KEYS[:1], [memoryview(payload(KEYS[0]))])
    assert tier.drain(LIMIT)
    assert [tier.contains(key) for key in KEYS[:2]] == [True, False]
    assert tier.clear() == KEYS[:1]
    tier.close()


def test_of_a_store_that_lists_none_the_oldest_objects_are_forgotten(monkeypatch):
    monkeypatch.setattr(storage, "KNOWN", 4)
    monkeypatch.setattr(LocalStore, "is_complete", False)
    tier = alone(backend="memory")
    views = [memoryview(payload(key)) for key in KEYS[:6]]
    for number in range(6):
        tier.submit_store(number, KEYS[number : number + 1], views[number : number + 1])
        assert tier.drain(LIMIT)
    assert [tier.contains(key) for key in KEYS[:6]] == [False] * 2 + [True] * 4
    tier.remove(KEYS[2:6])
    assert tier.objects == 0
    tier.close()


def test_removed_objects_are_gone_at_once_and_after_a_restart(tmp_path):
    tier = open_file(tmp_path)
    keys = KEYS[:6]
    views = [memoryview(payload(key)) for key in keys]
    tier.submit_store("all", keys, views)
    assert tier.drain(LIMIT)
    tier.remove([keys[0], KEYS[200]])
    assert [tier.contains(key) for key in keys] == [False] + [True] * 5
    # a store that is submitted later is not undone by the removal
    tier.submit_store("again", keys[:1], views[:1])
    assert tier.drain(LIMIT)
    assert tier.contains(keys[0])
    assert tier.retain(keys[:3]) == 3
    assert [tier.contains(key) for key in keys] == [True] * 3 + [False] * 3
    tier.submit_load("left", keys, [memoryview(bytearray(BLOCK)) for _ in keys])
    assert tier.drain(LIMIT)
    assert tier.poll()[-1].ok == (True,) * 3 + (False,) * 3
    tier.close()
    again = open_file(tmp_path)
    assert [again.contains(key) for key in keys] == [True] * 3 + [False] * 3
    again.close()


def test_a_closed_tier_takes_no_job(tmp_path):
    tier = open_file(tmp_path)
    tier.close()
    tier.close()
    with pytest.raises(CacheClosed):
        tier.submit_store("job", KEYS[:1], [memoryview(payload(KEYS[0]))])


def test_close_lets_jobs_end_and_is_bounded():
    cache = faulty(timeout_s=30.0, close_timeout_s=0.2)
    store(cache, KEYS[:1])
    settle(cache)
    cache.reset()
    FaultyStore.mode = "hang"
    cache.lookup(KEYS[0])
    cache.end_step()
    began = time.monotonic()
    cache.shutdown()
    assert time.monotonic() - began < 20
    assert cache.health().status == "closed"
    FaultyStore.mode = "ok"


def test_nothing_grows_while_a_store_hangs_or_fails():
    cache = faulty(timeout_s=30.0, close_timeout_s=0.1)
    cache.start()
    FaultyStore.mode = "raise"
    for key in KEYS:
        store(cache, [key])
        cache.end_step()
    assert len(cache._unsaved) <= 8
    settle(cache)
    assert len(cache._storage.known._keys) == 0
    assert cache._storage.in_flight == 0
    cache.shutdown()


def test_an_unknown_back_end_is_a_config_error_at_the_start():
    cache = make(storage={"backend": "nothing"})
    with pytest.raises(ConfigError, match="nothing"):
        cache.start()
