"""Counts of outcomes."""

from __future__ import annotations

from kvactors.storage.backend import StoreCounters
from kvactors.storage.messages import Outcome


def test_every_outcome_is_counted_in_its_field():
    counters = StoreCounters()
    counters.read(bytes(Outcome))
    counters.written(bytes([Outcome.OK] * 2))
    counters.evicted = 3
    found = counters.statistics(7, 4096)
    assert found[:5] == (7, 4096, 1, 2, 1)
    assert found[5:11] == (1, 1, 1, 1, 1, 3)
    assert (found.breaker, found.faults, found.refused) == ("closed", 0, 1)
