"""A `TierCache` against a plain-Python model, and under random calls of threads."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvactors import Tier
from kvactors.tier_cache import Lookup, TierCache
from tests.tier_cache.helpers import KEYS, answer, load, make, payload, settle, store

SOME = KEYS[:10]
PARENTS = {key: SOME[(i - 1) // 2] if i else None for i, key in enumerate(SOME)}
keys_of = st.lists(st.sampled_from(SOME), min_size=1, max_size=6)


class HostModel:
    """The promises of the host tier, without an order of eviction.

    Attributes:
        readable: keys that are HIT.
        stores, loads: copies in flight. The key of a store that was reset is in `withdrawn`.
        held: keys that may not be evicted before the end of the step.
        parents: of the keys with a slot, where known.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.readable: set[bytes] = set()
        self.stores: set[bytes] = set()
        self.loads: Counter[bytes] = Counter()
        self.withdrawn: set[bytes] = set()
        self.held: set[bytes] = set()
        self.parents: dict[bytes, bytes] = {}

    @property
    def used(self) -> int:
        return len(self.readable | self.stores | set(self.loads) | self.withdrawn)

    def learn(self, keys: set[bytes]) -> None:
        """The engine named the parents of keys."""
        known = {key: PARENTS[key] for key in keys if key not in self.parents}
        self.parents.update({key: parent for key, parent in known.items() if parent is not None})

    def forget(self, keys: set[bytes]) -> None:
        """Keys have no slot any more."""
        for key in keys:
            self.parents.pop(key, None)

    def path(self, key: bytes | None) -> set[bytes]:
        """A key and its ancestors, as far as they are present."""
        found = set()
        while key is not None and key in self.readable | (self.stores - self.withdrawn):
            found.add(key)
            key = self.parents.get(key)
        return found

    def evictable(self, spared: set[bytes]) -> set[bytes]:
        """Keys that can be evicted, children before parents."""
        present = self.readable | (self.stores - self.withdrawn)
        free = self.readable - self.held - set(self.loads) - spared
        while True:
            above = {self.parents[key] for key in present - free if key in self.parents}
            if not free & above:
                return free
            free -= above


class HostMachine(RuleBasedStateMachine):
    """The cache's answers are those of the model. Evictions are read off the cache's answer."""

    cache: TierCache

    @initialize(num_slots=st.integers(1, 6))
    def open(self, num_slots):
        self.cache = make(num_slots, events=["host"])
        self.model = HostModel(num_slots)
        self.view: set[bytes] = set()  # of a consumer of the events
        self.slots: dict[bytes, int] = {}
        self.short = [0, 0]  # stores with waiting keys, in the last step and in this one

    @rule(key=st.sampled_from(SOME))
    def lookup(self, key):
        model, found = self.model, self.cache.lookup(key)
        if key in model.readable:
            assert found is Lookup.HIT
            model.held.add(key)
        elif key in model.stores and key not in model.withdrawn:
            assert found is Lookup.PENDING
        else:
            assert found is Lookup.MISS

    @rule(keys=keys_of, named=st.booleans())
    def prepare_store(self, keys, named):
        model = self.model
        parents = [PARENTS[key] for key in keys] if named else None
        taken = model.readable | model.stores | set(model.loads) | model.withdrawn
        wanted = [key for key in dict.fromkeys(keys) if key not in taken]
        # A store gets as many slots as each of the others that waited in the last step.
        share = min(len(wanted), -(-model.num_slots // max(1, self.short[0])))
        lacking = share - (model.num_slots - model.used)
        found = self.cache.prepare_store(keys, parents)
        evictable = model.evictable({*keys, *model.path(parents[0] if parents else None)})
        missing = max(0, lacking - len(evictable))
        assert list(found.keys) == wanted[: share - missing]
        assert [*found.waiting, *found.refused] == wanted[share - missing :]
        self.short[1] += bool(found.waiting)
        assert len(found.evicted) == max(0, lacking) - missing
        assert set(found.evicted) <= evictable
        for key in found.evicted:
            model.readable.remove(key)
            assert key not in {model.parents.get(other) for other in model.readable | model.stores}
        model.forget(set(found.evicted))
        model.stores |= set(found.keys)
        if named:
            model.learn((model.readable | (model.stores - model.withdrawn)).intersection(keys))
        for key, slot in zip(found.keys, found.slots, strict=True):
            self.slots[key] = slot
            self.cache.memory.view(slot)[:] = payload(key)

    @precondition(lambda self: self.model.stores)
    @rule(data=st.data(), success=st.booleans())
    def complete_store(self, data, success):
        model = self.model
        keys = data.draw(st.sets(st.sampled_from(sorted(model.stores)), min_size=1))
        self.cache.complete_store(keys, success)
        model.stores -= keys
        if success:
            model.readable |= keys - model.withdrawn
        else:
            model.forget(keys)
        model.withdrawn -= keys

    @precondition(lambda self: self.model.readable)
    @rule(data=st.data())
    def prepare_load(self, data):
        model = self.model
        key = data.draw(st.sampled_from(sorted(model.readable)))
        (slot,) = self.cache.prepare_load([key])
        assert slot == self.slots[key]
        model.loads[key] += 1

    @rule(keys=keys_of)
    def prepare_load_of_any(self, keys):
        if set(keys) <= self.model.readable:
            return
        with pytest.raises(ValueError, match="no readable host slot"):
            self.cache.prepare_load(keys)

    @precondition(lambda self: self.model.loads)
    @rule(data=st.data())
    def complete_load(self, data):
        model = self.model
        key = data.draw(st.sampled_from(sorted(model.loads)))
        assert bytes(self.cache.memory.view(self.slots[key])) == payload(key)
        self.cache.complete_load([key])
        model.loads[key] -= 1
        model.loads = +model.loads
        if not model.loads[key]:
            model.withdrawn.discard(key)

    @rule(keys=keys_of)
    def touch(self, keys):
        self.cache.touch(keys)

    @rule()
    def end_step(self):
        self.cache.end_step()
        self.short = [self.short[1], 0]
        self.model.held.clear()

    @rule()
    def reset(self):
        model = self.model
        self.cache.reset()
        model.withdrawn |= model.stores | set(model.loads)
        model.parents.clear()
        model.readable.clear()
        model.held.clear()

    @invariant()
    def sound(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        model = self.model
        for key in model.readable:
            assert bytes(self.cache.memory.view(self.slots[key])) == payload(key)
        for event in self.cache.take_events():
            assert event.tier is Tier.HOST
            assert self.view.isdisjoint(event.keys) if event.stored else self.view >= {*event.keys}
            self.view ^= set(event.keys)
        assert self.view == model.readable
        flying = self.cache.copies_in_flight()
        assert (set(flying.stores), Counter(flying.loads)) == (model.stores, model.loads)
        assert self.cache.statistics().resident <= model.num_slots

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.shutdown()


def test_the_host_tier_keeps_the_models_promises():
    run_state_machine_as_test(
        HostMachine,
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("num_slots", [1, 2, 5, 64])
@pytest.mark.parametrize("capacity", [1, 7])
def test_random_calls_with_storage_never_give_wrong_bytes(num_slots, capacity):
    noise = random.Random(num_slots * 100 + capacity)
    cache = make(num_slots, storage={"backend": "memory", "capacity_blocks": capacity})
    hits = 0
    for _ in range(300):
        key = noise.choice(SOME)
        action = noise.random()
        if action < 0.4:
            first = noise.randrange(8)
            store(cache, SOME[first : first + noise.choice((1, 2))])
        elif action < 0.9:
            if answer(cache, key) is Lookup.HIT:
                assert load(cache, key) == payload(key)
                hits += 1
        elif action < 0.95:
            cache.reset(storage=noise.random() < 0.5)
        else:
            cache.end_step()
        cache.check()
    settle(cache)
    assert hits or num_slots < 3
    assert cache.statistics().pinned == 0
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
