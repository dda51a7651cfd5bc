"""FlushNotifier turn by turn: each message in, and the calls, timers and answers that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from kvactors.flush_notifier.actor import FlushNotifier
from kvactors.flush_notifier.deliver import SinkDelivery
from kvactors.flush_notifier.messages import (
    BlocksRemoved,
    CallLate,
    Continue,
    Deliver,
    Delivered,
    Resync,
    RetryDue,
    WaitFlushed,
)
from kvactors.settings import FlushConfig
from kvactors.types import Reason, Residency, Tier
from tests.flush_notifier.helpers import BLOCK, announced, memory, names
from tests.support.stepper import Effects, Stepper


class Calls:
    """The calls of sinks that were started. They do not run."""

    def __init__(self) -> None:
        self.started: list[Any] = []

    def start(self, delivery: SinkDelivery, epoch: int) -> asyncio.Future[str]:
        self.started.append(tuple(delivery.batch.tasks) if delivery.begun else epoch)
        delivery.sink.call = asyncio.get_running_loop().create_future()
        return delivery.sink.call

    def tasks(self) -> list[tuple[Residency, int, int]]:
        """The tasks of the last call."""
        return [(one.residency, one.start_block_idx, one.count) for one in self.started[-1]]


class Notifier:
    """A notifier with one sink, whose epoch has begun."""

    def __init__(self, calls: Calls, **config: Any) -> None:
        self.calls = calls
        self.sink = memory("sink")
        self.config = FlushConfig(**config)
        self.stepper = Stepper(self.make)
        self.start = self.whole(Deliver())
        self.whole(Delivered("sink", self.number, ""))

    def make(self, ref: Any) -> FlushNotifier:
        return FlushNotifier(
            ref, block_size=BLOCK, sinks=[self.sink], config=self.config, epoch=100
        )

    @property
    def actor(self) -> FlushNotifier:
        return self.stepper.actor

    @property
    def number(self) -> int:
        """Of the last call."""
        return self.actor.sinks["sink"].number

    def whole(self, message: Any) -> Effects:
        """A turn, and the turns of the steps that it leaves."""
        last = total = self.stepper.turn(message)
        while steps := [one.message for one in last.told if isinstance(one.message, Continue)]:
            last = self.stepper.turn(steps[0])
            total = total.then(last)
        self.actor.check()
        return total


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    found = Calls()
    monkeypatch.setattr(SinkDelivery, "start", lambda *call: found.start(*call))
    return found


@pytest.fixture
def notifier(calls: Calls) -> Iterator[Notifier]:
    made = Notifier(calls)
    with made.stepper:
        yield made


def test_the_first_call_is_the_epoch_with_a_deadline(notifier):
    assert notifier.calls.started == [100]
    (timer,) = notifier.start.timers
    assert isinstance(timer.message, CallLate)
    assert (timer.message.sink, timer.message.number) == ("sink", 1)
    assert timer.when == notifier.config.timeout_s


def test_facts_are_collected_into_one_call(notifier):
    notifier.whole(announced(1, 2))
    notifier.whole(announced(1, 2, 3, start=2))
    assert len(notifier.calls.started) == 1, "not before Deliver"
    notifier.whole(Deliver())
    assert notifier.calls.tasks() == [(Residency.RESIDENT, 0, 3)]


def test_a_fact_during_a_call_waits_for_its_end(notifier):
    notifier.whole(announced(1))
    notifier.whole(Deliver())
    notifier.whole(BlocksRemoved(names(1)[0], Tier.DEVICE, Reason.DEVICE_DROP))
    notifier.whole(Deliver())
    assert len(notifier.calls.started) == 2
    notifier.whole(Delivered("sink", notifier.number, ""))
    notifier.whole(Deliver())
    assert notifier.calls.tasks() == [(Residency.GONE, 0, 1)]


def test_a_failed_call_is_repeated_after_the_back_off(notifier):
    notifier.whole(announced(1))
    notifier.whole(Deliver())
    effects = notifier.whole(Delivered("sink", notifier.number, "OSError: down"))
    (timer,) = effects.timers
    assert isinstance(timer.message, RetryDue)
    assert timer.when - notifier.stepper.now == notifier.config.retry_min_s
    notifier.whole(Deliver())
    assert len(notifier.calls.started) == 2, "not during the back-off"
    notifier.whole(timer.message)
    notifier.whole(Deliver())
    assert notifier.calls.tasks() == [(Residency.RESIDENT, 0, 1)]
    one = notifier.actor.sinks["sink"]
    assert (one.failures, one.last_error) == (1, "OSError: down")


def test_a_call_that_misses_its_deadline_is_cancelled_and_the_next_waits_for_its_end(notifier):
    notifier.whole(announced(1))
    notifier.whole(Deliver())
    number, call = notifier.number, notifier.sink.call
    notifier.whole(CallLate("sink", number))
    assert call.cancelled()
    notifier.whole(RetryDue("sink"))
    notifier.whole(Deliver())
    assert len(notifier.calls.started) == 2, "the call has not ended"
    notifier.whole(Delivered("sink", number, "cancelled"))
    notifier.whole(Deliver())
    assert len(notifier.calls.started) == 3


def test_settle_is_answered_when_the_call_ends(notifier):
    notifier.whole(announced(1))
    ask = WaitFlushed()
    assert notifier.whole(ask).answered == ()
    notifier.whole(Deliver())
    (answer,) = notifier.whole(Delivered("sink", notifier.number, "")).answered
    assert (answer.message, answer.value) == (ask, True)


def test_settle_for_healthy_sinks_leaves_out_a_failing_one(notifier):
    notifier.whole(announced(1))
    notifier.whole(Deliver())
    notifier.whole(Delivered("sink", notifier.number, "down"))
    (answer,) = notifier.whole(WaitFlushed(healthy=True)).answered
    assert answer.value is True
    assert notifier.whole(WaitFlushed()).answered == ()


def test_a_resync_sends_the_epoch_and_everything_again_before_it_is_answered(notifier):
    notifier.whole(announced(1, 2))
    notifier.whole(Deliver())
    notifier.whole(Delivered("sink", notifier.number, ""))
    assert notifier.whole(Resync("sink")).answered == ()
    notifier.whole(Deliver())
    assert notifier.calls.started[-1] == 100
    notifier.whole(Delivered("sink", notifier.number, ""))
    notifier.whole(Deliver())
    assert notifier.calls.tasks() == [(Residency.RESIDENT, 0, 2)]
    (answer,) = notifier.whole(Delivered("sink", notifier.number, "")).answered
    assert answer.value is True


def test_a_large_fact_is_taken_in_slices_and_sent_as_one_task(notifier):
    notifier.actor.step = 4
    effects = notifier.stepper.turn(announced(*range(10)))
    (slice_,) = [one.message for one in effects.told if isinstance(one.message, Continue)]
    assert len(notifier.actor.ledger.tree) == 4
    notifier.whole(slice_)
    notifier.whole(Deliver())
    assert notifier.calls.tasks() == [(Residency.RESIDENT, 0, 10)]
