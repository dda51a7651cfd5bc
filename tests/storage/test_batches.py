"""Batches of a storage actor, and their effects."""

from __future__ import annotations

from collections.abc import Sequence

from kvactors.storage.actors import IN_FLIGHT, Batch, BatchQueue, changes_of
from kvactors.storage.messages import BatchDone, Written
from kvactors.types import Reason

A, B, C, D, E = (bytes([letter]) * 32 for letter in b"abcde")
ANSWER = Written(1, b"")


def batch(op: int) -> Batch:
    return Batch(lambda: None, BatchDone(Written(op, b"")))


def test_a_few_batches_start_and_the_others_wait_in_order():
    queue = BatchQueue()
    batches = [batch(op) for op in range(IN_FLIGHT + 2)]
    for one in batches:
        queue.add(one)
    assert list(queue.startable()) == batches[:IN_FLIGHT]
    assert list(queue.startable()) == []
    queue.in_flight -= 1
    assert list(queue.startable()) == [batches[IN_FLIGHT]]


def test_a_batch_out_of_turn_counts_as_in_flight():
    queue = BatchQueue()
    queue.in_flight += IN_FLIGHT
    queue.add(batch(1))
    assert list(queue.startable()) == []


class Store:
    def __init__(self, *keys: bytes) -> None:
        self.keys = keys

    def holding(self, keys: Sequence[bytes]) -> list[bytes]:
        return [key for key in keys if key in self.keys]


def test_changes_are_those_that_are_still_true():
    done = BatchDone(ANSWER, stored=A + B, evicted=C + D, corrupt=E, taken=b"")
    changes = changes_of(done, Store(A, D))
    assert changes.stored == A
    assert changes.removed == [(C, Reason.STORAGE_EVICTION), (E, Reason.CORRUPT)]
    assert changes.acknowledged == [C, D, E]


def test_a_key_that_was_taken_leaves_as_promoted():
    assert changes_of(BatchDone(ANSWER, taken=A), Store()).removed == [(A, Reason.PROMOTION)]


def test_a_batch_without_changes_reports_nothing():
    assert changes_of(BatchDone(ANSWER), Store(A)) == ([], b"", [])
