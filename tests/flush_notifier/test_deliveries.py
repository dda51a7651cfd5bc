"""SinkDelivery: when a sink is called, with what, and how a call's end is counted."""

from __future__ import annotations

import pytest

from kvactors.actor.sliced import finish
from kvactors.flush_notifier import deliver
from kvactors.flush_notifier.deliver import SinkDelivery
from kvactors.settings import FlushConfig
from tests.flush_notifier.helpers import announced, do, ledger, memory

EPOCH = 1
CONFIG = FlushConfig(batch=100, retry_min_s=1.0, retry_max_s=4.0)


@pytest.fixture
def clock(monkeypatch):
    time = [0.0]
    monkeypatch.setattr(deliver, "now", lambda: time[0])
    return time


def delivery(*branches: int) -> SinkDelivery:
    """Of a sink that has acknowledged its epoch, with a path of one block due for each branch."""
    book = ledger()
    for branch in branches:
        do(book.announce(announced(branch)))
    one = SinkDelivery(memory("m"), book.sinks[0], CONFIG)
    one.begun = True
    return one


def begin(one: SinkDelivery) -> None:
    one.in_flight = True
    finish(one.take(EPOCH))


def fail(one: SinkDelivery, acknowledged: int = 0) -> float:
    one.sink.num_acknowledged = acknowledged
    delay = one.call_failed("refused")
    finish(one.apply_result())
    one.call_ended()
    return delay


def succeed(one: SinkDelivery) -> float | None:
    since = one.call_succeeded()
    finish(one.apply_result())
    one.call_ended()
    return since


def test_an_epoch_that_succeeds_ends_no_failure_of_deliveries(clock):
    one = delivery(1)
    begin(one)
    fail(one)
    clock[0] = 5.0
    for _ in range(2):
        one.begun = False  # a resync
        begin(one)
        assert succeed(one) is None
        assert (one.failures > 0, one.last_error) == (True, "refused")
        assert one.view.pending == 1
    begin(one)
    clock[0] = 7.0
    assert succeed(one) == 7.0
    assert not one.failures
    one.begun = False
    fail(one)
    assert one.failures
    assert succeed(one) == 0.0, "an epoch that failed is made good by one that is taken"
    assert not one.failures


def test_the_back_off_doubles_up_to_its_limit_and_ends_with_a_success(clock):
    one = delivery(1)
    delays = []
    for _ in range(4):
        begin(one)
        delays.append(fail(one))
    assert delays == [1.0, 2.0, 4.0, 4.0]
    begin(one)
    succeed(one)
    assert one.delay == 1.0


def test_the_age_of_what_is_pending_counts_from_the_first(clock):
    one = delivery(1)
    one.note_pending()
    clock[0] = 2.0
    one.note_pending()
    assert one.statistics().oldest_pending_age == 2.0
    begin(one)
    succeed(one)
    assert one.statistics().oldest_pending_age == 0.0
