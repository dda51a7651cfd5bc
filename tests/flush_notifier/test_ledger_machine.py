"""The ledger against a naive model: any facts, any interleaving with deliveries that succeed, fail,
or lose their answers, any limits."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvactors.types import Reason, Tier, join_hashes
from tests.flush_notifier.helpers import (
    PER_TIER,
    announced,
    delivered,
    do,
    known,
    ledger,
    names,
    path,
    refused,
    settle,
    take,
)
from tests.flush_notifier.ledger_model import DEPTH, VIEWS, WIDTH, Model, Settings, rooted, walk

branches = st.lists(st.integers(0, WIDTH - 1), min_size=1, max_size=DEPTH).map(tuple).map(rooted)
tiers = st.sampled_from(list(Tier))
some = st.sets(st.integers(0, 3)).map(sorted).map(tuple)


class LedgerMachine(RuleBasedStateMachine):
    @initialize(
        views=st.lists(st.sampled_from(VIEWS), min_size=1, max_size=4),
        idle_limit=st.integers(1, 64),
        takes_clear=some,
        by_name=some,
    )
    def begin(self, views, idle_limit, takes_clear, by_name):
        takes_clear, by_name = (
            tuple(i for i in chosen if i < len(views)) for chosen in (takes_clear, by_name)
        )
        self.model = Model(Settings(tuple(views), idle_limit, takes_clear, by_name))

    def sink(self, number):
        return number % len(self.model.sinks)

    @rule(branch=branches, tier=tiers, data=st.data())
    def announce(self, branch, tier, data):
        start = data.draw(st.integers(0, len(branch)))
        self.model.announce(branch, start, data.draw(st.integers(0, len(branch) - start)), tier)

    @rule(branch=branches)
    def finish(self, branch):
        self.model.finish(branch)

    @rule(branch=branches, tier=tiers)
    def gain(self, branch, tier):
        self.model.gain(branch, tier)

    @rule(branch=branches, last=st.integers(1, DEPTH), tier=tiers)
    def lose(self, branch, last, tier):
        self.model.lose(branch, last, tier)

    @rule(tier=tiers)
    def clear(self, tier):
        self.model.clear(tier)

    @rule()
    def clear_everything(self):
        self.model.clear_everything()

    @rule()
    def go_on(self):
        self.model.go_on()

    @rule(number=st.integers(0, 3), limit=st.integers(1, 8))
    def take(self, number, limit):
        self.model.take(self.sink(number), limit)

    @rule(number=st.integers(0, 3), answered=st.booleans(), arrived=st.integers(0, 5))
    def end(self, number, answered, arrived):
        self.model.end(self.sink(number), answered=answered, arrived=arrived)

    @rule(number=st.integers(0, 3), taken=st.integers(0, 4))
    def end_in_the_middle(self, number, taken):
        self.model.end_in_the_middle(self.sink(number), taken)

    @rule(number=st.integers(0, 3))
    def repeat(self, number):
        self.model.repeat(self.sink(number))

    @rule(number=st.integers(0, 3))
    def lose_index(self, number):
        self.model.lose_index(self.sink(number))

    @rule()
    def settle(self):
        self.model.settle()

    @invariant()
    def ledger_and_model_agree(self):
        if hasattr(self, "model"):
            self.model.compare()

    def teardown(self):
        if hasattr(self, "model"):
            self.model.settle()


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("seed", range(40))
def test_random_walks_with_small_limits(seed):
    walk(seed, 600)


def test_the_walks_forget_and_interleave():
    """The tests above would prove nothing if these did not happen."""
    walks = [walk(seed, 600) for seed in range(10)]
    assert sum(model.forgotten for model in walks) > 50
    assert len({model.settings for model in walks}) == 10
    assert {model.settings.idle_limit for model in walks} & {1, 2, 3}


def tell(book):
    settle(book)
    book.check()


def test_a_parent_in_the_same_batch_is_not_forgotten_before_it_is_remembered():
    book = ledger(idle_limit=1)
    do(book.announce(announced(0, 1)))
    do(book.announce(announced(2)))
    tell(book)
    do(book.lose(names(0, 1)[1], Tier.DEVICE, Reason.DEVICE_DROP))
    tell(book)
    do(book.lose(join_hashes([names(2)[0], names(0)[0]]), Tier.DEVICE, Reason.DEVICE_DROP))
    tell(book)
    do(book.announce(announced(2, 2)))
    tell(book)
    do(book.lose(path(2, 2)[1], Tier.DEVICE, Reason.DEVICE_DROP))
    tell(book)
    assert len(book.tree) <= 2


def test_a_refused_clear_does_not_bring_back_forgotten_entries():
    book = ledger(PER_TIER, PER_TIER, idle_limit=1, takes_clear=[0])
    do(book.announce(announced(0)))
    tell(book)
    settle(book, 1)
    do(book.lose(names(0)[0], Tier.DEVICE, Reason.DEVICE_DROP))
    tell(book)
    settle(book, 1)
    do(book.announce(announced(1)))
    tell(book)
    do(book.clear(Tier.DEVICE, Reason.CLEAR))
    batch = take(book, 0, 10, 1)
    settle(book, 1)
    do(book.announce(announced(2)))
    do(book.lose(names(2)[0], Tier.DEVICE, Reason.DEVICE_DROP))  # it takes the place of block 0
    refused(book, 0, batch)
    book.check()
    for i in range(3, 6):
        do(book.announce(announced(i)))
        do(book.lose(names(i)[0], Tier.DEVICE, Reason.DEVICE_DROP))
        book.check()
    tell(book)


def test_an_entry_that_was_held_at_the_end_of_a_path_is_forgotten_in_its_turn():
    book = ledger(idle_limit=1)
    do(book.announce(announced(0)))
    tell(book)
    do(book.lose(names(0)[0], Tier.DEVICE, Reason.DEVICE_DROP))
    batch = take(book, 0, 10, 1)
    path_of_two = book.announce(announced(5, 6, count=1))  # its second block is nowhere
    next(path_of_two)
    next(path_of_two)
    delivered(book, 0, batch)  # block 0 is idle now, and takes the place of the second block
    do(path_of_two)
    tell(book)
    do(book.lose(names(5)[0], Tier.DEVICE, Reason.DEVICE_DROP))
    tell(book)
    do(book.announce(announced(7)))
    tell(book)
    do(book.lose(names(7)[0], Tier.DEVICE, Reason.DEVICE_DROP))
    tell(book)
    assert known(book) == set(names(7))


@pytest.mark.parametrize("idle_limit", [1, 3])
def test_a_small_limbo_forgets_only_blocks_on_no_tier(idle_limit):
    book = ledger(*VIEWS, idle_limit=idle_limit)
    kept = set()
    for i in range(200):
        branch = [i % 3, i % 5, i % 7, i % 2]
        do(book.announce(announced(*branch, start=i % 3)))
        if i % 4:
            do(book.lose(path(*branch)[1], Tier.DEVICE, Reason.CPU_EVICTION))
            kept.difference_update(names(*branch))
        else:
            do(book.gain(names(*branch)[-1], Tier.DEVICE, Reason.LOAD))
        kept.update(names(*branch)[i % 3 :] if not i % 4 else ())
        book.check()
        assert kept <= known(book) | set(book.orphans.tiers)
