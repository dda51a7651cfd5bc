"""The host tier of a `TierCache`: look-ups, stores, loads, eviction, threads."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

from kvactors import ConfigError, LayoutError, Tier, WrongThread, open_tiers
from kvactors.tier_cache import Lookup, TierCache, TierEvent, shared_memory
from kvactors.types import Reason
from tests.support.numa import bound_node
from tests.tier_cache.helpers import KEYS, elsewhere, make, store


def test_a_key_is_missing_then_pending_then_a_hit():
    cache = make()
    assert cache.lookup(KEYS[0]) is Lookup.MISS
    found = cache.prepare_store(KEYS[:2])
    assert found.keys == tuple(KEYS[:2])
    assert len(set(found.slots)) == 2
    assert found.evicted == ()
    assert cache.lookup(KEYS[0]) is Lookup.PENDING
    cache.complete_store({KEYS[1], KEYS[0]})
    assert cache.lookup(KEYS[0]) is Lookup.HIT
    assert cache.prepare_load(KEYS[:2]) == list(found.slots)
    cache.check()


def test_a_hit_is_not_evicted_before_the_end_of_the_step():
    cache = make(2)
    store(cache, KEYS[:2])
    assert cache.lookup(KEYS[0]) is Lookup.HIT
    found = cache.prepare_store(KEYS[2:4])
    assert (found.keys, found.evicted, found.waiting) == ((KEYS[2],), (KEYS[1],), (KEYS[3],))
    assert cache.lookup(KEYS[0]) is Lookup.HIT
    cache.end_step()
    found = cache.prepare_store(KEYS[3:4])
    assert (found.keys, found.evicted, found.waiting) == ((KEYS[3],), (KEYS[0],), ())


def test_a_load_pins_its_slots():
    cache = make(2)
    store(cache, KEYS[:2])
    cache.lookup(KEYS[0])
    cache.prepare_load(KEYS[:1])
    cache.prepare_load(KEYS[:1])
    cache.end_step()
    assert cache.prepare_store(KEYS[2:4]).evicted == (KEYS[1],)
    cache.complete_load(KEYS[:1])
    assert cache.prepare_store(KEYS[2:4]).waiting == (KEYS[3],)
    cache.complete_load(KEYS[:1])
    assert cache.prepare_store(KEYS[2:4]).evicted == (KEYS[0],)
    cache.check()


def test_a_child_is_evicted_before_its_parent():
    cache = make(3)
    for i in range(3):
        store(cache, KEYS[i : i + 1], [KEYS[i - 1] if i else None])
    found = cache.prepare_store(KEYS[3:5])
    assert found.evicted == (KEYS[2], KEYS[1])


def test_a_parent_that_comes_late_is_evicted_after_its_child():
    cache = make(3)
    store(cache, KEYS[:3])
    cache.prepare_store(KEYS[:3], [None, KEYS[0], KEYS[1]])
    cache.touch([KEYS[2], KEYS[1], KEYS[0]])  # the wrong way round
    found = cache.prepare_store(KEYS[3:5])
    assert found.evicted == (KEYS[2], KEYS[1])


def test_keys_that_name_each_other_as_parents_can_be_evicted():
    cache = make(3)
    cache.prepare_store(KEYS[:3], [KEYS[2], KEYS[0], KEYS[1]])
    cache.complete_store(KEYS[:3])
    cache.prepare_store(KEYS[:3], [KEYS[2], KEYS[0], KEYS[1]])
    found = cache.prepare_store(KEYS[3:6])
    assert set(found.evicted) == set(KEYS[:3])
    cache.check()


def test_touched_keys_are_evicted_last():
    cache = make(3)
    store(cache, KEYS[:3])
    cache.touch([KEYS[2]])
    found = cache.prepare_store(KEYS[3:5])
    assert KEYS[2] not in found.evicted


def test_a_completion_that_no_copy_has_is_refused_and_changes_nothing():
    cache = make()
    cache.prepare_store(KEYS[:2])
    with pytest.raises(ValueError, match="no store of key"):
        cache.complete_store(KEYS[:3])
    assert cache.lookup(KEYS[0]) is Lookup.PENDING
    cache.complete_store(KEYS[:2])
    with pytest.raises(ValueError, match="no store of key"):
        cache.complete_store(KEYS[:1])
    cache.prepare_load(KEYS[:1])
    for wrong in (KEYS[:2], [KEYS[0], KEYS[0]]):
        with pytest.raises(ValueError, match="load"):
            cache.complete_load(wrong)
    with pytest.raises(ValueError, match="no readable host slot"):
        cache.prepare_load(KEYS[1:3])
    cache.complete_load(KEYS[:1])
    assert not cache.has_pending_work()
    cache.check()


def test_a_slot_in_use_at_a_reset_is_free_when_its_copy_ends():
    cache = make(2)
    store(cache, KEYS[:1])
    cache.prepare_load(KEYS[:1])
    cache.prepare_store(KEYS[1:2])
    cache.reset()
    assert cache.lookup(KEYS[0]) is Lookup.MISS
    assert cache.prepare_store(KEYS[2:3]).keys == (), "a slot in use was handed out"
    again = cache.prepare_store(KEYS[:2])
    assert (again.keys, again.waiting) == ((), ()), (
        "a key was stored again while its former copy was in flight"
    )
    cache.complete_load(KEYS[:1])
    cache.complete_store(KEYS[1:2])
    assert cache.lookup(KEYS[1]) is Lookup.MISS
    store(cache, KEYS[:2])
    cache.check()


def test_events_name_parents_before_children_and_removals_the_other_way_round():
    cache = make(3, events=["host"])
    cache.prepare_store(KEYS[:3], [None, *KEYS[:2]])
    cache.complete_store(set(KEYS[:3]))
    cache.prepare_store(KEYS[3:4])
    cache.reset()
    assert cache.take_events() == [
        TierEvent(Tier.HOST, True, tuple(KEYS[:3]), Reason.OFFLOAD),
        TierEvent(Tier.HOST, False, (KEYS[2],), Reason.CPU_EVICTION),
        TierEvent(Tier.HOST, False, (KEYS[1], KEYS[0]), Reason.CLEAR),
    ]
    assert cache.take_events() == []


def test_calls_of_other_threads_take_effect_at_the_owners_next_call():
    cache = make()
    cache.prepare_store(KEYS[:2])
    elsewhere(cache.complete_store, KEYS[:2])
    assert cache.has_pending_work()
    assert cache.lookup(KEYS[0]) is Lookup.HIT
    with pytest.raises(WrongThread):
        elsewhere(cache.lookup, KEYS[0])
    elsewhere(cache.reset)
    assert cache.lookup(KEYS[0]) is Lookup.MISS
    elsewhere(cache.adopt)
    with pytest.raises(WrongThread):
        cache.lookup(KEYS[0])


def test_given_memory_is_used_in_rows():
    memory = bytearray(1000)
    cache = open_tiers({"model": "m", "block_bytes": 64, "num_slots": 4}, memory=memory, stride=256)
    cache.memory.view(3)[:] = b"x" * 64
    assert memory[768:832] == b"x" * 64
    assert bytes(memory[832:]) == bytes(168)
    with pytest.raises(IndexError):
        cache.memory.view(4)


@pytest.mark.parametrize(
    ("memory", "stride"),
    [(bytearray(255), None), (bytes(256), None), (bytearray(999), 63), ([], 64)],
)
def test_memory_that_does_not_fit_is_refused(memory: object, stride: int | None):
    with pytest.raises(LayoutError):
        open_tiers({"model": "m", "block_bytes": 64, "num_slots": 4}, memory=memory, stride=stride)


def test_two_mappings_of_one_file_share_their_slots(tmp_path):
    first = shared_memory(tmp_path / "slots", 4096, create=True)
    with pytest.raises(FileExistsError):
        shared_memory(tmp_path / "slots", 4096, create=True)
    second = shared_memory(tmp_path / "slots", 4096, create=False)
    one, two = (make_over(memory) for memory in (first, second))
    one.memory.view(1)[:] = b"y" * 64
    assert bytes(two.memory.view(1)) == b"y" * 64
    with pytest.raises(LayoutError):
        shared_memory(tmp_path / "slots", 8192, create=False)


def make_over(memory: object) -> TierCache:
    return open_tiers({"model": "m", "block_bytes": 64, "num_slots": 4}, memory=memory)


def test_the_import_is_silent_and_light():
    script = (
        "import signal, sys; before = signal.getsignal(signal.SIGINT); "
        "from kvactors import open_tiers; "
        "assert signal.getsignal(signal.SIGINT) is before; "
        "heavy = {'asyncio', 'structlog', 'anyio', 'numpy', 'kvactors.actor'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# -- the NUMA node that the slots come from


NUMA = {"model": "m", "block_bytes": 5000, "num_slots": 4}


def test_slots_are_bound_to_their_node_and_hold_bytes():
    cache = open_tiers({**NUMA, "numa_node": 0})
    assert bound_node(cache.memory.address) == 0
    assert bound_node(cache.memory.address + 3 * cache.memory.stride) == 0
    cache.memory.view(3)[:] = b"x" * 5000
    assert bytes(cache.memory.view(3)) == b"x" * 5000
    cache.shutdown()


def test_slots_without_a_node_are_not_bound():
    cache = open_tiers(NUMA)
    assert bound_node(cache.memory.address) is None
    cache.shutdown()


def test_given_memory_is_bound_if_it_begins_at_a_page():
    memory = mmap.mmap(-1, 6 * 8192)
    cache = open_tiers({**NUMA, "numa_node": 0}, memory=memory, stride=8192)
    assert bound_node(cache.memory.address) == 0
    cache.shutdown()
    with pytest.raises(ConfigError, match="does not begin at a page"):
        open_tiers({**NUMA, "numa_node": 0}, memory=memoryview(memory)[64:], stride=8192)


@pytest.mark.parametrize("node", [-1, 1024, 1.5, "0", 1023])
def test_a_node_that_does_not_exist_is_named(node):
    with pytest.raises(ConfigError, match="numa_node"):
        open_tiers({**NUMA, "numa_node": node})
