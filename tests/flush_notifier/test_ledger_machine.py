"""The ledger against a naive model: any facts, any interleaving with deliveries that succeed, fail, or lose their answers."""

from __future__ import annotations

import pytest
from flush_kit import AT_FINISH, BLOCK, NODE, PER_TIER, announced, answer, do, finished, ledger, names, path
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvactors.units import Reason, Residency, Tier, join_keys, split_keys

VIEWS = (PER_TIER, NODE, AT_FINISH)
branches = st.lists(st.integers(0, 2), min_size=1, max_size=5)
tiers = st.sampled_from(list(Tier))
sinks = st.integers(0, len(VIEWS) - 1)


class LedgerMachine(RuleBasedStateMachine):
    """truth: tiers by name. mirrors: by sink, tiers by name, as the tasks that arrived say. flying: by sink, the batch under way."""

    def __init__(self):
        super().__init__()
        self.book = ledger(*VIEWS, limbo=10_000, takes_clear=[0])
        self.truth: dict[bytes, int] = {}
        self.paths: dict[bytes, bytes] = {}
        self.finished: set[bytes] = set()
        self.mirrors: list[dict[bytes, int]] = [{} for _ in VIEWS]
        self.flying: list = [None] * len(VIEWS)

    def learn(self, branch):
        self.paths.update({key: path(*branch[: i + 1])[0] for i, key in enumerate(names(*branch))})

    def hold(self, keys, tier):
        self.truth.update({key: self.truth.get(key, 0) | tier for key in keys})

    @rule(branch=branches, tier=tiers, data=st.data())
    def announce(self, branch, tier, data):
        start = data.draw(st.integers(0, len(branch)))
        count = data.draw(st.integers(0, len(branch) - start))
        do(self.book.announce(announced(*branch, start=start, count=count, tier=tier)))
        self.learn(branch)
        self.hold(names(*branch)[start : start + count], tier)

    @rule(branch=branches)
    def finish(self, branch):
        do(self.book.announce(finished(*branch)))
        self.learn(branch)
        self.hold(names(*branch), Tier.DEVICE)
        self.finished.update(names(*branch))

    @rule(branch=branches, tier=tiers)
    def gain(self, branch, tier):
        do(self.book.gain(path(*branch)[1], tier, Reason.OFFLOAD))
        self.hold(names(*branch), tier)

    @rule(branch=branches, last=st.integers(1, 5), tier=tiers)
    def lose(self, branch, last, tier):
        keys = names(*branch)[-last:]
        do(self.book.lose(join_keys(reversed(keys)), tier, Reason.CPU_EVICTION))
        self.truth.update({key: self.truth.get(key, 0) & ~tier for key in keys})

    @rule(tier=tiers)
    def clear(self, tier):
        do(self.book.clear(tier, Reason.CLEAR))
        self.truth = {key: mask & ~tier for key, mask in self.truth.items()}

    @rule()
    def clear_everything(self):
        for tier in Tier:
            self.clear(tier)

    @rule(sink=sinks, limit=st.integers(1, 6))
    def take(self, sink, limit):
        if self.flying[sink] is None:
            self.flying[sink] = self.book.take(sink, limit, 7)
            assert bool(self.flying[sink].tasks) == bool(self.book.pending(sink))

    @rule(sink=sinks, answered=st.booleans(), arrived=st.booleans())
    def end(self, sink, answered, arrived):
        if self.flying[sink] is None:
            return
        if answered or arrived:
            self.arrive(sink)
        if answered:
            answer(self.book, sink, self.flying[sink])
        else:
            self.book.refused(sink, self.flying[sink])
        self.flying[sink] = None

    @rule(sink=sinks, taken=st.integers(0, 4))
    def end_in_the_middle(self, sink, taken):
        if self.flying[sink] is None or self.flying[sink].cleared:
            return
        self.flying[sink], rest = self.flying[sink].split(taken)
        self.arrive(sink)
        self.book.delivered(sink, self.flying[sink])
        self.book.refused(sink, rest)
        self.flying[sink] = None

    def arrive(self, sink):
        mirror, gained = self.mirrors[sink], False
        for task in self.flying[sink].tasks:
            keys, bit = split_keys(task.keys), int(task.tier)
            if not task.count:
                assert sink == 0
                assert len(self.flying[sink].tasks) == 1
                mirror.clear()
                continue
            assert task.epoch == 7
            assert len(keys) == task.count >= 1
            for i, key in enumerate(keys):
                end = 4 * BLOCK * (task.start_block_idx + i + 1)
                assert task.tokens[:end] == self.paths[key], "the complete path, block by block"
            assert end == len(task.tokens)
            if task.residency is Residency.RESIDENT:
                gained = True
                mirror.update({key: mirror.get(key, 0) | bit for key in keys})
            else:
                assert not gained, "losses come first"
                mirror.update({key: mirror.get(key, 0) & ~bit for key in keys})

    def expected(self, sink, key):
        view = VIEWS[sink]
        mask = self.truth.get(key, 0) & view.tiers if key in self.paths else 0
        return int(Tier.DEVICE) * bool(mask) if view.node else mask

    @invariant()
    def the_books_balance(self):
        self.book.check()

    @invariant()
    def what_no_difference_is_pending_for_is_believed_rightly(self):
        """Of every block that is neither pending nor under way: the mirror says what is true, except gains not yet due."""
        for sink, mirror in enumerate(self.mirrors):
            if self.flying[sink] and self.flying[sink].cleared:
                continue
            under_way = {k for task in (self.flying[sink].tasks if self.flying[sink] else ()) for k in split_keys(task.keys)}
            pending = {entry.key for entry in self.book.dirty[sink]} | under_way
            for key in (self.paths.keys() | mirror.keys()) - pending:
                expected = self.expected(sink, key)
                if VIEWS[sink].at_finish and key not in self.finished:
                    expected &= mirror.get(key, 0)
                assert mirror.get(key, 0) == expected

    @precondition(lambda self: not any(self.flying))
    @rule()
    def come_to_rest(self):
        for sink in range(len(VIEWS)):
            while self.book.pending(sink):
                self.flying[sink] = self.book.take(sink, 4, 7)
                self.end(sink, answered=True, arrived=True)

    def teardown(self):
        for sink in range(len(VIEWS)):
            self.end(sink, answered=True, arrived=True)
        self.come_to_rest()
        self.what_no_difference_is_pending_for_is_believed_rightly()
        assert not any(self.book.dirty)


LedgerMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLedgerMachine = LedgerMachine.TestCase


@pytest.mark.parametrize("limbo", [1, 3])
def test_a_small_limbo_forgets_only_what_is_nowhere(limbo):
    book = ledger(*VIEWS, limbo=limbo)
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
        assert kept <= set(book.entries)
