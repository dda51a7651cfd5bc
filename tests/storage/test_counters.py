"""Counts of outcomes, and when they open the circuit."""

from __future__ import annotations

from kvactors.storage import breaker
from kvactors.storage.breaker import FAILURES
from kvactors.storage.counters import StoreCounters
from kvactors.storage.messages import Outcome


def test_every_outcome_is_counted_in_its_field():
    counters = StoreCounters()
    counters.record(bytes(Outcome))
    counters.reads, counters.writes, counters.evicted = 1, 2, 3
    found = counters.statistics(7, 4096)
    assert found[:5] == (7, 4096, 1, 2, 1)
    assert found[5:11] == (1, 1, 1, 1, 1, 3)
    assert (found.breaker, found.faults) == ("closed", 0)


def test_batches_without_any_success_open_the_circuit(monkeypatch):
    monkeypatch.setattr(breaker, "now", lambda: 0.0)
    counters = StoreCounters("a store")
    for _ in range(FAILURES):
        counters.record(bytes([Outcome.UNAVAILABLE, Outcome.MISS]), "slow")
    assert counters.breaker.closed()
    for _ in range(FAILURES):
        counters.record(bytes([Outcome.UNAVAILABLE] * 2), "disk gone")
    assert (counters.breaker.state(), counters.breaker.reason) == ("open", "disk gone")


def test_an_empty_batch_is_no_failure():
    counters = StoreCounters()
    for _ in range(FAILURES):
        counters.record(b"")
    assert counters.breaker.closed()
