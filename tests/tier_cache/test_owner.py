"""The calls that other threads hand over to the owner of a cache, and the pace of its steps."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvactors.errors import WrongThread
from kvactors.tier_cache import Lookup, StorageTier, waits
from kvactors.tier_cache.waits import EMPTY_STEP, PAUSE, StepPace
from tests.tier_cache.helpers import KEYS, LIMIT, elsewhere, make, payload, settle, store

MANY = 5000
"""More calls than the interpreter nests."""


def test_any_number_of_copies_may_end_between_two_steps():
    """In their order, and none within another: they would end the engine."""
    cache = make(2)
    store(cache, KEYS[:1])
    assert cache.lookup(KEYS[0]) is Lookup.HIT
    for _ in range(MANY):
        cache.prepare_load(KEYS[:1])
    elsewhere(lambda: [cache.complete_load(KEYS[:1]) for _ in range(MANY)])
    cache.end_step()
    assert cache.statistics().pinned == 0
    cache.check()
    cache.shutdown()


def test_a_call_that_is_refused_does_not_keep_the_others():
    cache = make()
    cache.prepare_store(KEYS[:2])
    for keys in (KEYS[:1], KEYS[:1], KEYS[1:2]):
        elsewhere(cache.complete_store, keys)
    assert [cache.lookup(key) for key in KEYS[:2]] == [Lookup.HIT] * 2
    cache.shutdown()


def test_of_two_first_calls_one_opens_and_the_other_does_not_go_on(monkeypatch):
    """The other thread would read slots and storage that are not open yet."""
    begun, go = threading.Event(), threading.Event()

    def opened(_tier, _limit):
        begun.set()
        assert go.wait(LIMIT)

    monkeypatch.setattr(StorageTier, "open", opened)
    cache = make()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(cache.start)
        assert begun.wait(LIMIT)
        for call in (cache.start, cache.adopt):
            with pytest.raises(WrongThread, match="call adopt"):
                call()
        cache.touch(KEYS[:1])
        assert cache.has_pending_work(), "the call is handed over"
        go.set()
        first.result(LIMIT)
        with pytest.raises(WrongThread, match="call adopt"):
            cache.start()
        pool.submit(cache.lookup, KEYS[0]).result(LIMIT)
        assert not cache.has_pending_work()
    cache.adopt()
    cache.start()
    cache.shutdown()


def test_threads_complete_copies_while_the_owner_works():
    cache = make(16, storage={"backend": "memory", "capacity_blocks": 8})
    noise = random.Random(3)
    ended: list[tuple[bool, list[bytes]]] = []
    stop = threading.Event()
    errors: list[BaseException] = []

    def complete() -> None:
        try:
            while not (stop.is_set() and not ended):
                if ended:
                    stored, keys = ended.pop()
                    (cache.complete_store if stored else cache.complete_load)(keys)
                cache.statistics()
                cache.health()
                cache.has_pending_work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=complete)
    cache.start()
    thread.start()
    for _ in range(2000):
        key = noise.choice(KEYS[:40])
        if cache.lookup(key) is Lookup.HIT:
            (slot,) = cache.prepare_load([key])
            assert bytes(cache.memory.view(slot)) == payload(key)
            ended.append((False, [key]))
        elif (found := cache.prepare_store([key])).keys:
            cache.memory.view(found.slots[0])[:] = payload(key)
            ended.append((True, [key]))
        if noise.random() < 0.3:
            cache.end_step()
    stop.set()
    thread.join(60)
    assert errors == []
    settle(cache)
    cache.check()
    assert cache.statistics().pinned == 0
    cache.shutdown()


# -- pauses between empty steps, so that fetches are not starved by an engine that only waits


@pytest.fixture
def clock(monkeypatch):
    """The time and the pauses of the steps."""
    clock = {"now": 100.0, "pauses": []}

    def sleep(seconds):
        clock["pauses"].append(seconds)
        clock["now"] += seconds

    monkeypatch.setattr(waits.time, "monotonic", lambda: clock["now"])
    monkeypatch.setattr(waits.time, "sleep", sleep)
    return clock


def test_a_step_that_computes_is_followed_by_no_pause(clock):
    steps = StepPace()
    for _ in range(10):
        clock["now"] += 2 * EMPTY_STEP
        steps.step_ended()
    assert clock["pauses"] == []


def test_each_empty_step_after_the_first_is_followed_by_a_pause(clock):
    steps = StepPace()
    for _ in range(10):
        clock["now"] += 0.1 * EMPTY_STEP
        steps.step_ended()
    assert clock["pauses"] == [PAUSE] * 9
