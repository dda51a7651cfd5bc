"""SlotSupply: where the next free slot comes from, and the capacity without quarantined slots."""

from __future__ import annotations

import pytest

from kvactors.storage.catalog import Catalog
from kvactors.storage.file import slots as slots_module
from kvactors.storage.file.slots import SlotSupply
from kvactors.storage.messages import Outcome
from tests.support.steps import run_unsuspended


class FakeGrowth:
    """Adds a slab of two slots for each OK among its outcomes."""

    capacity = 0

    def __init__(self, supply: SlotSupply, *outcomes: Outcome) -> None:
        self.supply, self.outcomes = supply, list(outcomes)

    async def more(self) -> Outcome:
        outcome = self.outcomes.pop(0) if self.outcomes else Outcome.NO_SPACE
        if outcome == Outcome.OK:
            self.supply.slots.give([10, 11])
        return outcome

    def ahead(self) -> None:
        pass


class FakeThreads:
    workers = None


@pytest.fixture
def clock(monkeypatch):
    time = [0.0]
    monkeypatch.setattr(slots_module, "now", lambda: time[0])
    return time


def supply_of(*outcomes: Outcome, capacity: int = 4, free: int = 0) -> SlotSupply:
    supply = SlotSupply(None, FakeThreads(), Catalog())  # type: ignore[arg-type]
    supply.growth = FakeGrowth(supply, *outcomes)  # type: ignore[assignment]
    supply.set_capacity(capacity)
    supply.slots.give(range(free))
    return supply


async def nothing_to_evict() -> bool:
    return False


def take(supply: SlotSupply, squeeze=nothing_to_evict):
    return run_unsuspended(supply.take(squeeze, lambda: False))


def test_free_slots_are_taken_in_order_before_the_store_grows(clock):
    supply = supply_of(Outcome.OK, free=2)
    assert [take(supply) for _ in range(3)] == [(slot, Outcome.OK) for slot in (0, 1, 10)]


def test_a_full_disk_evicts_one_object_for_the_slot(clock):
    supply, asked = supply_of(), []

    async def squeeze() -> bool:
        asked.append(1)
        supply.slots.give([7])
        return True

    assert take(supply, squeeze) == (7, Outcome.OK)
    assert asked == [1]


def test_there_is_no_slot_if_nothing_can_be_evicted(clock):
    assert take(supply_of()) == (None, Outcome.NO_SPACE)


def test_a_disk_that_fails_is_not_asked_to_evict(clock):
    async def squeeze() -> bool:
        raise AssertionError("evicted")

    assert take(supply_of(Outcome.UNAVAILABLE), squeeze) == (None, Outcome.UNAVAILABLE)


def test_a_quarantined_slot_lowers_the_capacity_until_its_time_has_passed(clock):
    supply = supply_of(free=0)
    supply.quarantine(3)
    assert supply._catalog.capacity == 3
    clock[0] = 1e9
    assert take(supply) == (3, Outcome.OK)
    assert supply._catalog.capacity == 4


def test_the_capacity_is_never_zero(clock):
    supply = supply_of(capacity=1)
    supply.quarantine(0)
    assert supply._catalog.capacity == 1


def test_first_offenders_return_before_an_object_is_evicted(clock):
    async def squeeze() -> bool:
        raise AssertionError("evicted")

    supply = supply_of()
    supply.quarantine(3)
    assert take(supply, squeeze) == (3, Outcome.OK)


def test_a_batch_that_would_evict_tries_quarantined_slots_first(clock):
    supply = supply_of()
    supply._catalog.admit([bytes([number]) * 32 for number in range(3)])
    supply.quarantine(3)
    supply.prepare(0)
    assert supply._catalog.capacity == 3
    supply.prepare(1)
    assert (supply._catalog.capacity, list(supply.slots.free)) == (4, [3])
