"""The calls that other threads hand over to the owner of a cache."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from kvactors.errors import WrongThread
from kvactors.tier_cache import Lookup
from kvactors.tier_cache.owner import Owner
from tests.tier_cache.helpers import KEYS, LIMIT, make, payload, settle

MANY = 5000
"""More calls than the interpreter nests."""


def test_any_number_of_calls_is_made_in_order():
    owner, made = Owner(lambda: None), []

    def call(number):
        owner.catch_up()  # as each call of the owner does
        made.append(number)

    owner.adopt()
    owner.handed.extend(partial(call, number) for number in range(MANY))
    owner.catch_up()
    assert made == list(range(MANY))


def test_a_call_that_fails_does_not_keep_the_others():
    owner, made = Owner(lambda: None), []

    def refused():
        raise ValueError("no load of a key is in flight")

    owner.handed.extend([refused, partial(made.append, 1), refused, partial(made.append, 2)])
    owner.catch_up()
    assert made == [1, 2]
    owner.handed.append(partial(made.append, 3))
    owner.catch_up()
    assert made == [1, 2, 3]


def test_of_two_first_calls_one_opens_and_the_other_does_not_go_on():
    """The other thread would read slots and storage that are not open yet."""
    begun, go = threading.Event(), threading.Event()

    def start():
        begun.set()
        assert go.wait(LIMIT)

    owner, made = Owner(start), []
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(owner.check)
        assert begun.wait(LIMIT)
        for call in (owner.check, owner.adopt):
            with pytest.raises(WrongThread, match="call adopt"):
                call()
        assert owner.hands_over(partial(made.append, 1))
        go.set()
        first.result(LIMIT)
        with pytest.raises(WrongThread, match="call adopt"):
            owner.check()
        pool.submit(owner.catch_up).result(LIMIT)
    assert made == [1]
    owner.adopt()
    owner.check()


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
