"""SinkSet: which asks are answered when a sink acknowledges."""

from __future__ import annotations

import pytest

from kvactors.actor import Envelope
from kvactors.actor.sliced import finish
from kvactors.flush_notifier import deliver
from kvactors.flush_notifier.deliver import SinkDelivery, SinkSet
from kvactors.flush_notifier.messages import WaitFlushed
from kvactors.settings import FlushConfig
from kvactors.types import Reason, Tier
from tests.flush_notifier.helpers import announced, do, ledger, memory, path

EPOCH = 1


class Bench:
    """A ledger with two sinks that have acknowledged their epoch."""

    def __init__(self) -> None:
        self.book = ledger(*2 * [ledger().sinks[0].filter])
        self.set = SinkSet([memory(name) for name in "ab"], self.book, FlushConfig())
        self.sinks = self.set.deliveries
        for one in self.sinks:
            one.begun = True

    def announce(self, *branch: int) -> None:
        do(self.book.announce(announced(*branch)))

    def ask(self, *sinks: SinkDelivery) -> Envelope[bool]:
        envelope: Envelope[bool] = Envelope(WaitFlushed(), FakeReply())  # type: ignore[arg-type]
        self.set.wait(envelope, sinks or self.sinks)
        return envelope

    def begin(self, one: SinkDelivery) -> None:
        one.in_flight = True
        finish(one.take(EPOCH))

    def end(self, one: SinkDelivery) -> None:
        one.call_succeeded()
        finish(self.set.finish_call(one))

    def deliver(self, one: SinkDelivery) -> None:
        self.begin(one)
        self.end(one)


class FakeReply:
    abandoned = False

    def done(self) -> bool:
        return self.abandoned


@pytest.fixture
def bench(monkeypatch) -> Bench:
    monkeypatch.setattr(deliver, "now", lambda: 0.0)
    return Bench()


def test_blocks_announced_after_the_ask_are_not_waited_for(bench):
    first, _ = bench.sinks
    bench.announce(1)
    envelope = bench.ask(first)
    bench.begin(first)
    bench.announce(2)
    bench.end(first)
    assert first.view.pending == 1
    assert bench.set.take_done() == [envelope]


def test_a_block_removed_while_its_call_is_in_flight_is_waited_for(bench):
    first, _ = bench.sinks
    bench.announce(1)
    bench.begin(first)
    do(bench.book.lose(path(1)[1], Tier.DEVICE, Reason.DEVICE_DROP))
    envelope = bench.ask(first)
    bench.end(first)
    assert bench.set.take_done() == [], "the sink has a block that is gone"
    bench.deliver(first)
    assert bench.set.take_done() == [envelope]


def test_asks_that_were_given_up_are_removed(bench):
    bench.announce(1)
    kept, given_up = bench.ask(), bench.ask()
    given_up.reply.abandoned = True
    assert bench.set.take_abandoned() == [given_up]
    assert len(bench.set.waiters) == 1
    for one in bench.sinks:
        bench.deliver(one)
    assert bench.set.take_done() == [kept]
