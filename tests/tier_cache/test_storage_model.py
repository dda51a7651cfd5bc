"""A `TierCache` over stores with faults, against a plain-Python model."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

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

from kvactors import Tier, TierCache
from kvactors.tier_cache import Lookup
from tests.tier_cache.faulty_stores import MODES, Faults
from tests.tier_cache.helpers import KEYS, LIMIT, make, payload, settle

SOME = KEYS[:8]
STORES = {"memory": "FaultyMemory", "file": "FaultyFile"}
keys_of = st.lists(st.sampled_from(SOME), min_size=1, max_size=4)


class StoreModel:
    """The promises of host tier and storage together. Storage may lose objects at any time, and
    may not invent any.

    Attributes:
        written: keys whose bytes the engine has handed over since storage was emptied.
        stores, loads: copies in flight. The key of a copy that was reset is in `withdrawn`.
        pinned: keys of loads in flight, which stay readable.
        hits: keys answered HIT in this step.
    """

    def __init__(self) -> None:
        self.written: set[bytes] = set()
        self.stores: set[bytes] = set()
        self.loads: Counter[bytes] = Counter()
        self.withdrawn: set[bytes] = set()
        self.hits: set[bytes] = set()


class StorageMachine(RuleBasedStateMachine):
    """A HIT has the right bytes with every fault, and events add up to the tiers."""

    kind = "memory"
    cache: TierCache

    @initialize(
        num_slots=st.integers(1, 4),
        capacity=st.integers(1, 6),
        policy=st.sampled_from(["write_through", "write_back", "write_through_selective"]),
    )
    def open(self, num_slots, capacity, policy):
        Faults.mode = "ok"
        self.folder = Path(tempfile.mkdtemp())
        self.capacity = capacity
        self.cache = make(
            num_slots,
            events=["host", "storage"],
            storage={
                "backend": f"tests.tier_cache.faulty_stores:{STORES[self.kind]}",
                "directory": str(self.folder),
                "capacity_blocks": capacity,
                "write_policy": policy,
                "timeout_s": 30.0,
                "slot_timeout_s": 0.02,
                "on_full_wait_s": 0.02,
            },
        )
        self.model = StoreModel()
        self.views: dict[Tier, set[bytes]] = {Tier.HOST: set(), Tier.STORAGE: set()}
        self.slots: dict[bytes, int] = {}

    @rule(mode=st.sampled_from(MODES))
    def fault(self, mode):
        Faults.mode = mode

    @rule(keys=keys_of)
    def lookup(self, keys):
        for key in keys:
            if self.cache.lookup(key) is Lookup.HIT:
                assert key in self.model.written, "a block that the engine never stored"
                assert key not in self.model.stores, "a block that is being copied"
                self.model.hits.add(key)

    @precondition(lambda self: self.model.hits)
    @rule(data=st.data())
    def prepare_load(self, data):
        key = data.draw(st.sampled_from(sorted(self.model.hits)))
        (slot,) = self.cache.prepare_load([key])
        self.slots[key] = slot
        self.model.loads[key] += 1

    @rule(keys=keys_of)
    def load_all_that_hit(self, keys):
        """A request that is admitted: look up, pin, copy, release."""
        found = [key for key in dict.fromkeys(keys) if self.cache.lookup(key) is Lookup.HIT]
        slots = self.cache.prepare_load(found)
        for key, slot in zip(found, slots, strict=True):
            assert key in self.model.written
            assert bytes(self.cache.memory.view(slot)) == payload(key)
        self.cache.complete_load(found)
        self.model.hits.update(found)

    @precondition(lambda self: self.model.loads)
    @rule(data=st.data())
    def complete_load(self, data):
        model = self.model
        key = data.draw(st.sampled_from(sorted(model.loads)))
        self.cache.complete_load([key])
        model.loads[key] -= 1
        model.loads = +model.loads
        if not model.loads[key]:
            model.withdrawn.discard(key)

    @rule(keys=keys_of)
    def prepare_store(self, keys):
        model = self.model
        found = self.cache.prepare_store(keys)
        assert not model.stores.intersection(found.keys)
        assert not set(model.loads).intersection(found.evicted), "a block that is being loaded"
        assert not model.hits.intersection(found.evicted), "a block that was answered HIT"
        for key, slot in zip(found.keys, found.slots, strict=True):
            assert slot not in {self.slots[other] for other in model.loads}
            self.slots[key] = slot
            self.cache.memory.view(slot)[:] = payload(key)
        model.stores |= set(found.keys)

    @precondition(lambda self: self.model.stores)
    @rule(data=st.data(), success=st.booleans())
    def complete_store(self, data, success):
        model = self.model
        keys = data.draw(st.sets(st.sampled_from(sorted(model.stores)), min_size=1))
        self.cache.complete_store(keys, success)
        model.stores -= keys
        if success:
            model.written |= keys - model.withdrawn
        model.withdrawn -= keys

    @rule(keys=keys_of, mode=st.sampled_from(("ok", "ok", *MODES)))
    def store_and_settle(self, keys, mode):
        """Whole blocks on their way to a store of that mode."""
        Faults.mode = mode
        self.copies_end(success=False)
        self.cache.end_step()
        self.model.hits.clear()
        self.prepare_store(keys)
        self.copies_end(success=True)
        self.cache.touch(keys)
        self.settles()

    def copies_end(self, *, success):
        """No copy is in flight any more."""
        model = self.model
        if model.stores:
            self.cache.complete_store(list(model.stores), success)
        model.written |= model.stores - model.withdrawn if success else set()
        for key in model.loads.elements():
            self.cache.complete_load([key])
        model.stores.clear()
        model.loads.clear()
        model.withdrawn.clear()

    @rule(mode=st.sampled_from(MODES))
    def fetch_all(self, mode):
        """An empty host tier over a store of that mode."""
        Faults.mode = mode
        self.reset(storage=False)
        self.settles()

    @rule(keys=keys_of)
    def touch(self, keys):
        self.cache.touch(keys)

    @rule(steps=st.integers(1, 4))
    def end_steps(self, steps):
        for _ in range(steps):
            self.cache.end_step()
        self.model.hits.clear()

    @rule(storage=st.booleans())
    def reset(self, storage):
        model = self.model
        self.cache.reset(storage=storage)
        model.withdrawn |= model.stores | set(model.loads)
        model.hits.clear()
        if storage:
            model.written.clear()

    @rule()
    def settles(self):
        """Work in flight ends with every fault, and no look-up is pending without end."""
        model = self.model
        until = time.monotonic() + LIMIT
        self.cache.end_step()
        model.hits.clear()
        for key in SOME:
            while self.cache.lookup(key) is Lookup.PENDING and key not in model.stores:
                assert time.monotonic() < until, "a look-up is pending without end"
                time.sleep(0.001)
                self.cache.end_step()
        moves = self.cache._moves
        while moves is not None and moves.pending_work:
            assert time.monotonic() < until, "saves and fetches do not end"
            time.sleep(0.001)
            self.cache.end_step()
        self.cache.end_step()

    @invariant()
    def sound(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        model = self.model
        for event in self.cache.take_events():
            view = self.views[event.tier]
            assert view.isdisjoint(event.keys) if event.stored else view >= set(event.keys)
            view ^= set(event.keys)
        assert self.views[Tier.HOST] | self.views[Tier.STORAGE] <= model.written
        for key in model.loads:
            assert bytes(self.cache.memory.view(self.slots[key])) == payload(key)
        flying = self.cache.copies_in_flight()
        assert (set(flying.stores), Counter(flying.loads)) == (model.stores, model.loads)
        assert self.cache.statistics().stored_objects <= self.capacity

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        Faults.mode = "ok"
        self.copies_end(success=False)
        settle(self.cache)
        self.sound()
        assert self.cache.statistics().pinned == 0
        assert len(self.views[Tier.STORAGE]) <= self.cache.statistics().stored_objects
        self.cache.shutdown()
        shutil.rmtree(self.folder)


class FileMachine(StorageMachine):
    """The same over files, whose bytes are flipped on the disk."""

    kind = "file"


@pytest.mark.parametrize("machine", [StorageMachine, FileMachine], ids=["memory", "file"])
def test_the_tiers_keep_the_models_promises_over_a_store_with_faults(machine):
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=30,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("machine", [StorageMachine, FileMachine], ids=["memory", "file"])
def test_the_machine_reads_damaged_objects(machine):
    """Its rules reach the fault that matters most. A random walk may miss it."""
    before, walk = Faults.damages, machine()
    walk.open(num_slots=4, capacity=6, policy="write_through")
    walk.store_and_settle(SOME[:4], "ok")
    walk.sound()
    walk.fetch_all("damages")
    walk.sound()
    walk.teardown()
    assert Faults.damages > before
