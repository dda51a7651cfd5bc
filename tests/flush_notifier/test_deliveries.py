"""SinkDelivery: when a sink is called, with what, and how a call's end is counted."""

from __future__ import annotations

import pytest

from kvactors.actor.sliced import finish
from kvactors.flush_notifier import deliver
from kvactors.flush_notifier.deliver import SinkDelivery, slice_pause
from kvactors.settings import FlushConfig
from tests.flush_notifier.helpers import announced, do, ledger, memory, names

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


def test_a_sink_is_called_when_something_is_due_or_its_epoch_has_not_begun(clock):
    assert delivery(1).ready()
    idle = delivery()
    assert not idle.ready()
    idle.begun = False
    assert idle.ready()


@pytest.mark.parametrize("what", ["in_flight", "backing_off", "stuck"])
def test_a_sink_is_not_called_while_it_is(clock, what):
    one = delivery(1)
    setattr(one, what, True)
    assert not one.ready()


def test_the_first_call_of_an_incarnation_has_no_tasks(clock):
    one = delivery(1)
    one.begun = False
    begin(one)
    assert (one.number, one.batch.tasks) == (1, [])
    assert succeed(one) is None
    assert one.begun
    begin(one)
    assert len(one.batch.tasks) == 1


def test_a_delivered_batch_is_counted(clock):
    one = delivery(1, 2)
    begin(one)
    succeed(one)
    statistics = one.statistics()
    assert (statistics.delivered, statistics.resident, statistics.blocks) == (2, 2, 2)
    assert (statistics.pending, statistics.in_flight, statistics.failures) == (0, False, 0)


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


def test_health_is_about_the_last_call(clock):
    one = delivery(1)
    begin(one)
    fail(one)
    clock[0] = 3.0
    assert (one.failures, one.last_error, one.statistics().failing_for) == (1, "refused", 3.0)
    begin(one)
    assert succeed(one) == 3.0
    assert (one.failures, one.statistics().failing_for) == (0, 0.0)
    assert one.statistics().last_error == "refused"


def test_of_a_failed_call_the_acknowledged_tasks_are_not_sent_again(clock):
    one = delivery(1, 2, 3)
    begin(one)
    first, second, third = (task.hashes for task in one.batch.tasks)
    fail(one, acknowledged=1)
    assert first in {block.hash for block in one.view.held_blocks()}
    begin(one)
    assert {task.hashes for task in one.batch.tasks} == {second, third}


@pytest.mark.parametrize("count", [-1, 4, True, "1", None])
def test_a_count_that_cannot_be_acknowledges_nothing(clock, count):
    one = delivery(1, 2, 3)
    begin(one)
    fail(one, acknowledged=count)
    begin(one)
    assert len(one.batch.tasks) == 3


def test_a_report_of_an_earlier_call_is_late(clock):
    one = delivery(1)
    begin(one)
    number = one.number
    assert one.is_current(number)
    fail(one)
    assert not one.is_current(number)
    begin(one)
    assert not one.is_current(number)


def test_the_age_of_what_is_pending_counts_from_the_first(clock):
    one = delivery(1)
    one.note_pending()
    clock[0] = 2.0
    one.note_pending()
    assert one.statistics().oldest_pending_age == 2.0
    begin(one)
    succeed(one)
    assert one.statistics().oldest_pending_age == 0.0


def test_a_resync_sends_everything_due_again(clock):
    one = delivery(1, 2)
    begin(one)
    succeed(one)
    one.resync_due = True
    assert finish(one.resync()) == []
    assert (one.begun, one.view.pending, one.resyncs) == (False, 2, 1)
    assert not list(one.view.held_blocks())
    assert {one.hash for one in one.view.held_blocks(every=True)} == {names(1)[0], names(2)[0]}


def test_a_slow_repetition_takes_half_of_its_interval_within_bounds():
    assert slice_pause(100.0, 1000, 100) == pytest.approx(deliver.LONGEST_PAUSE_S)
    assert slice_pause(10.0, 1000, 50) == pytest.approx(0.25)
    assert slice_pause(0.0, 1000, 50) == pytest.approx(deliver.SHORTEST_PAUSE_S)
