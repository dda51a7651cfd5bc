"""Storage below a `TierCache`: saves, fetches, restarts, corrupt and missing objects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvactors import CacheClosed, StoreError, Tier
from kvactors.tier_cache import Lookup, TierEvent
from kvactors.types import Reason
from tests.tier_cache.helpers import (
    KEYS,
    LIMIT,
    Clock,
    answer,
    in_child,
    load,
    make,
    on_disk,
    payload,
    settle,
    store,
)


def test_a_stored_key_comes_back_after_a_restart(tmp_path):
    cache = on_disk(tmp_path)
    store(cache, KEYS[:3])
    settle(cache)
    assert cache.statistics().saved == 3
    cache.shutdown()
    cache = on_disk(tmp_path)
    assert cache.lookup(KEYS[1]) is Lookup.PENDING
    assert cache.lookup(KEYS[3]) is Lookup.MISS
    assert answer(cache, KEYS[1]) is Lookup.HIT
    assert cache.source(KEYS[1]) is Tier.STORAGE
    assert load(cache, KEYS[1]) == payload(KEYS[1])
    assert cache.source(KEYS[1]) is Tier.HOST
    assert load(cache, KEYS[1]) == payload(KEYS[1])
    found = cache.statistics()
    assert (found.storage_hits, found.host_hits, found.fetched) == (1, 1, 1)
    assert (found.stored_objects, found.resident, found.pinned) == (3, 1, 0)
    cache.check()
    cache.shutdown()


def test_a_look_up_of_the_host_tier_alone_fetches_nothing(tmp_path):
    cache = on_disk(tmp_path)
    store(cache, KEYS[:1])
    settle(cache)
    cache.reset()
    assert cache.lookup(KEYS[0], storage=False) is Lookup.MISS
    settle(cache)
    assert cache.statistics().fetched == 0
    assert cache.lookup(KEYS[0]) is Lookup.PENDING
    cache.end_step()
    assert cache.lookup(KEYS[0], storage=False) is Lookup.PENDING
    assert answer(cache, KEYS[0]) is Lookup.HIT
    assert cache.lookup(KEYS[0], storage=False) is Lookup.HIT
    cache.shutdown()


def test_saves_that_wait_are_written_at_the_shutdown(tmp_path):
    cache = on_disk(tmp_path, num_slots=64)
    store(cache, KEYS[:20])
    cache.shutdown()
    cache = on_disk(tmp_path)
    assert answer(cache, KEYS[7]) is Lookup.HIT
    cache.shutdown()


@pytest.mark.parametrize("damage", ["flip", "truncate"])
def test_damaged_objects_are_misses_and_can_be_stored_again(tmp_path, damage):
    cache = on_disk(tmp_path, num_slots=16)
    store(cache, KEYS[:8])
    settle(cache)
    cache.shutdown()
    slabs = [file for file in tmp_path.rglob("*") if file.is_file() and "slab" in file.name]
    assert slabs
    for slab in slabs:
        if damage == "truncate":
            os.truncate(slab, 0)
        else:
            data = bytearray(slab.read_bytes())
            for i in range(0, len(data), 64):
                data[i] ^= 0x40
            slab.write_bytes(data)
    cache = on_disk(tmp_path, num_slots=16)
    assert [answer(cache, key) for key in KEYS[:8]] == [Lookup.MISS] * 8
    assert cache.statistics().fetched == 0
    assert store(cache, KEYS[:8])
    settle(cache)
    cache.reset()
    for key in KEYS[:8]:
        assert answer(cache, key) is Lookup.HIT
        assert load(cache, key) == payload(key)
    cache.check()
    cache.shutdown()


def test_blocks_of_another_identity_are_not_found(tmp_path):
    table = {"backend": "file", "directory": str(tmp_path), "free_space_floor": 0}
    cache = make(storage=table, identity={"seed": 0})
    store(cache, KEYS[:1])
    settle(cache)
    cache.shutdown()
    for settings in ({"identity": {"seed": 1}}, {"model": "n", "identity": {"seed": 0}}):
        other = make(storage=table, **settings)
        assert other.lookup(KEYS[0]) is Lookup.MISS
        other.shutdown()


@pytest.mark.parametrize("held_by", ["hits", "loads", "stores"])
def test_a_look_up_without_a_free_slot_ends(held_by):
    """The engine keeps every slot in use: the request is not held up for longer than the limit,
    and not again and again."""
    clock = Clock()
    cache = make(2, clock=clock, storage={"backend": "memory", "slot_timeout_s": 2.0})
    store(cache, KEYS[:1])
    settle(cache)
    assert store(cache, KEYS[1:3])
    settle(cache)
    if held_by == "stores":
        assert cache.prepare_store(KEYS[3:5]).keys == tuple(KEYS[3:5])
    else:
        assert [cache.lookup(key) for key in KEYS[1:3]] == [Lookup.HIT] * 2
        if held_by == "loads":
            cache.prepare_load(KEYS[1:3])

    def step() -> Lookup:
        if held_by != "hits":
            cache.end_step()
        return cache.lookup(KEYS[0])

    found = []
    for _ in range(40):
        found.append(step())
        clock.now += 0.1
    assert found == [Lookup.PENDING] * 20 + [Lookup.MISS] * 20
    assert cache.statistics().refused_fetches == 1
    if held_by == "stores":
        cache.complete_store(KEYS[3:5])
    elif held_by == "loads":
        cache.complete_load(KEYS[1:3])
    until = time.monotonic() + LIMIT
    while cache.lookup(KEYS[0]) is not Lookup.HIT:
        assert time.monotonic() < until, "a key that was refused stays a miss"
        cache.end_step()
        time.sleep(0.001)
    cache.check()
    cache.shutdown()


def test_without_patience_a_look_up_without_a_free_slot_is_a_miss():
    cache = make(1, storage={"backend": "memory", "slot_timeout_s": 0})
    for key in KEYS[:2]:
        store(cache, [key])
        settle(cache)
    assert cache.lookup(KEYS[1]) is Lookup.HIT
    assert [cache.lookup(KEYS[0]) for _ in range(2)] == [Lookup.PENDING, Lookup.MISS]
    cache.shutdown()


def test_events_of_both_tiers_are_exact(tmp_path):
    cache = on_disk(tmp_path, capacity_blocks=2)
    store(cache, KEYS[:2])
    settle(cache)
    host, *storage = cache.take_events()
    assert host == TierEvent(Tier.HOST, True, tuple(KEYS[:2]), Reason.OFFLOAD)
    assert {(event.tier, event.stored, event.reason) for event in storage} == {
        (Tier.STORAGE, True, Reason.STORED)
    }
    assert [key for event in storage for key in event.keys] == KEYS[:2]
    store(cache, KEYS[2:3])
    settle(cache)
    told = cache.take_events()
    assert TierEvent(Tier.STORAGE, True, (KEYS[2],), Reason.STORED) in told
    gone = [event.keys for event in told if not event.stored and event.tier is Tier.STORAGE]
    assert gone in ([(KEYS[0],)], [(KEYS[1],)])
    cache.reset(storage=True)
    removed = [event for event in cache.take_events() if event.tier is Tier.STORAGE]
    assert len(removed) == 1
    assert len(removed[0].keys) == 2
    cache.shutdown()
    cache = on_disk(tmp_path)
    assert cache.lookup(KEYS[2]) is Lookup.MISS, "a reset left stored objects"
    cache.shutdown()


def test_a_reset_keeps_stored_objects_unless_asked_to_delete_them(tmp_path):
    cache = on_disk(tmp_path)
    store(cache, KEYS[:2])
    settle(cache)
    cache.reset()
    assert cache.statistics().stored_objects == 2
    assert answer(cache, KEYS[0]) is Lookup.HIT
    cache.reset(storage=True)
    assert cache.statistics().stored_objects == 0
    assert cache.lookup(KEYS[0]) is Lookup.MISS
    settle(cache)
    cache.shutdown()
    cache = on_disk(tmp_path)
    assert cache.lookup(KEYS[1]) is Lookup.MISS, "no work was pending, and the object was there"
    cache.shutdown()


@pytest.mark.parametrize("policy", ["none", "write_through_selective", "write_back"])
def test_write_policies(tmp_path, policy):
    cache = on_disk(tmp_path, num_slots=8, write_policy=policy, min_hits=2)
    for i in range(8):
        store(cache, [KEYS[i]])
        settle(cache)
    if policy == "write_through_selective":
        cache.touch(KEYS[:4])
        cache.touch(KEYS[:2])
        settle(cache)
        assert cache.statistics().saved == 2
    if policy == "none":
        assert cache.statistics().saved == 0
    if policy == "write_back":
        for i in range(8, 24):
            store(cache, [KEYS[i]])
            settle(cache)
        found = cache.statistics()
        assert found.evicted == 16
        assert found.unsaved == 0
        assert answer(cache, KEYS[0]) is Lookup.HIT
        assert load(cache, KEYS[0]) == payload(KEYS[0])
    cache.check()
    cache.shutdown()


def test_a_store_that_cannot_be_opened_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("")
    cache = on_disk(tmp_path / "file" / "below")
    with pytest.raises(OSError) as caught:
        cache.start()
    assert isinstance(caught.value, StoreError)
    with pytest.raises(CacheClosed):
        cache.lookup(KEYS[0])
    cache.shutdown()


def test_a_folder_in_use_is_named_once(tmp_path):
    one, two = on_disk(tmp_path), on_disk(tmp_path)
    one.start()
    with pytest.raises(StoreError, match="in use by process") as caught:
        two.start()
    assert str(caught.value).count(str(tmp_path)) == 1
    one.shutdown()


def test_given_memory_has_no_views_left_after_the_shutdown(tmp_path):
    memory = bytearray(4 * 96)
    cache = make(memory=memory, storage={"backend": "file", "directory": str(tmp_path)})
    store(cache, KEYS[:4])
    settle(cache)
    cache.shutdown()
    memory.clear()  # BufferError if a view of it remained


def test_a_cache_made_before_a_fork_works_in_the_child_and_one_used_before_it_does_not(tmp_path):
    fresh, used = on_disk(tmp_path / "fresh"), on_disk(tmp_path / "used")
    store(used, KEYS[:1])

    def use() -> None:
        store(fresh, KEYS[:1])
        settle(fresh)
        fresh.shutdown()
        with pytest.raises(CacheClosed):
            used.lookup(KEYS[0])
        used.shutdown()

    assert in_child(use)
    assert used.lookup(KEYS[0]) is Lookup.HIT
    assert answer(fresh, KEYS[0]) is Lookup.HIT
    used.shutdown()
    fresh.shutdown()


CHILD = """
import sys
from tests.tier_cache.helpers import KEYS, on_disk, settle, store
cache = on_disk(sys.argv[1], num_slots=64)
for i in range(0, 256, 4):
    store(cache, KEYS[i : i + 4])
    cache.end_step()
    if i == 64:
        settle(cache)
        print("ready", flush=True)
cache.end_step()
sys.stdin.read()
"""


def test_after_kill_9_every_hit_has_the_right_bytes(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGKILL)
    cache = on_disk(tmp_path)
    hits = 0
    for key in KEYS:
        if answer(cache, key) is Lookup.HIT:
            hits += 1
            assert load(cache, key) == payload(key)
    assert hits > 0
    cache.shutdown()
