"""Load or recompute: predictions from measured times, without a cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvactors.fetch_cost import KEPT, PREFILL_MEASURED_S, TRIAL, FetchCost, PrefillRate, TimeLine
from kvactors.storage.messages import Outcome


class Store:
    """A modelled store that answers one read after another."""

    def __init__(self, latency: float, block_s: float) -> None:
        self.latency, self.block_s = latency, block_s
        self.now = 0.0
        self.cost = FetchCost(lambda: self.now)

    def read(self, blocks: int) -> float:
        """Read, and return the seconds that it took."""
        answered = self.cost.read(blocks, lambda _: None)
        seconds = self.latency + self.block_s * blocks
        self.now += seconds
        answered(bytes(blocks))
        return seconds

    def refusal(self, blocks: int, compute_s: float, *, asked: bool = True) -> str:
        return self.cost.refusal(blocks, compute_s, asked=asked)


# -- the line


def test_latency_and_bandwidth_are_found_from_reads_of_two_sizes():
    line = TimeLine()
    for at, blocks in enumerate((1, 64, 1, 64)):
        line.add(blocks, 0.05 + 0.002 * blocks, float(at))
    assert line.at(1) == pytest.approx(0.052)
    assert line.at(500) == pytest.approx(1.05)


def test_reads_of_one_size_are_a_bound_from_both_sides():
    """Until another size is read, more blocks may take no longer, and fewer be faster."""
    line = TimeLine()
    line.add(10, 1.0, 0.0)
    line.add(10, 3.0, 0.0)
    mean = (3.0 + KEPT) / (1 + KEPT)
    assert line.at(10) == pytest.approx(mean)
    assert line.at(1000) == pytest.approx(mean)
    assert line.at(1) == pytest.approx(mean / 10)


@pytest.mark.parametrize(
    ("reads", "blocks", "seconds"),
    [
        ([(1, 2.0), (3, 1.0)], 9, (2.0 * KEPT + 1.0) / (KEPT + 1)),  # no negative slope
        ([(1, 0.0), (3, 4.0)], 6, 72.0 / (KEPT + 9)),  # no negative latency
    ],
)
def test_neither_part_is_negative(reads, blocks, seconds):
    line = TimeLine()
    for size, took in reads:
        line.add(size, took, 0.0)
    assert line.at(blocks) == pytest.approx(seconds)


def test_a_new_measurement_counts_more_after_a_while():
    seconds = []
    for pause in (0.0, 60.0):
        line = TimeLine()
        for _ in range(20):
            line.add(4, 10.0, 0.0)
        line.add(4, 1.0, pause)
        seconds.append(line.at(4))
    assert seconds[0] > 8.0
    assert seconds[1] < 2.0


@given(
    st.lists(
        st.tuples(st.integers(1, 5000), st.floats(0, 1e4), st.floats(0, 100)),
        min_size=1,
        max_size=30,
    ),
    st.lists(st.integers(0, 10_000), min_size=2, max_size=2).map(sorted),
)
def test_more_blocks_never_take_less(reads, sizes):
    line, now = TimeLine(), 0.0
    for blocks, seconds, pause in reads:
        now += pause
        line.add(blocks, seconds, now)
    few, many = map(line.at, sizes)
    assert 0.0 <= few <= many * (1 + 1e-9) + 1e-9


# -- decisions


def test_a_store_without_a_measurement_is_read():
    assert Store(1e9, 1e9).refusal(1, 1e-9) == ""


def test_without_the_speed_of_the_engine_everything_is_fetched():
    store = Store(5.0, 1.0)
    store.read(1)
    store.read(9)
    assert store.refusal(9, 0.0) == ""


def test_latency_refuses_few_blocks_and_bandwidth_many():
    distant, narrow = Store(0.1, 0.001), Store(0.001, 0.1)
    for store in (distant, narrow):
        store.read(1)
        store.read(64)
    assert [distant.refusal(n, 0.01 * n) for n in (5, 20, 100)] == ["slow", "", ""]
    assert [narrow.refusal(n, 0.1 * n + 0.05) for n in (1, 100)] == ["", ""]
    assert [narrow.refusal(n, 0.09 * n) for n in (1, 100)] == ["slow", "slow"]


def test_the_time_of_the_look_up_counts_until_it_is_answered():
    store = Store(0.01, 0.01)
    store.read(1)
    store.read(9)
    answered = store.cost.ask(lambda _: None)
    store.now += 1.0
    answered(4)
    assert store.refusal(4, 0.5, asked=False) == "slow"
    assert store.refusal(4, 0.5) == ""


def test_reads_in_flight_are_waited_for():
    store = Store(0.0, 0.1)
    store.read(1)
    store.read(9)
    ended = store.cost.read(10, lambda _: None)
    assert store.refusal(5, 1.4) == "backlog"
    assert store.refusal(5, 1.6) == ""
    assert store.cost.refusal(5, 1.6, 3, asked=True) == "backlog"
    store.now += 1.0
    ended(bytes(10))
    assert store.refusal(5, 0.6) == ""


def test_a_read_that_does_not_end_refuses_the_next_ones():
    """The first read of a store hangs: there is nothing else to go by."""
    store = Store(0.0, 0.1)
    store.cost.read(1, lambda _: None)
    assert store.refusal(5, 2.0) == ""
    store.now = 3.0
    assert store.refusal(5, 2.0) == "backlog"
    assert store.refusal(5, 4.0) == ""


@pytest.mark.parametrize("outcome", [Outcome.LATE, Outcome.UNAVAILABLE, Outcome.MISS])
def test_a_read_that_brought_nothing_measures_nothing(outcome):
    store, told = Store(0.0, 0.0), []
    answered = store.cost.read(3, told.append)
    store.now = 9.0
    answered(bytes([outcome] * 3))
    assert told == [bytes([outcome] * 3)]
    assert store.refusal(3, 0.1) == ""


def test_of_a_read_that_was_cut_the_blocks_that_came_count():
    store = Store(0.0, 0.0)
    answered = store.cost.read(4, lambda _: None)
    store.now = 1.0
    answered(bytes([Outcome.OK] + [Outcome.LATE] * 3))
    assert store.cost.reads.at(1) == 1.0


def test_a_store_that_recovers_is_used_again():
    """Requests of one size, at one a second. The store is slow for a minute."""
    store, compute_s, waits, fetched = Store(0.01, 0.001), 0.2, [], []
    for second in range(200):
        store.now = max(store.now, float(second))
        store.latency = 2.0 if 60 <= second < 120 else 0.01
        blocks = (8, 16)[second % 2]
        why = store.refusal(blocks, compute_s)
        if why and not store.cost.is_trial():
            waits.append(compute_s)
            continue
        fetched.append(second)
        waits.append(min(store.read(blocks), 2 * compute_s))
    assert len([at for at in fetched if 60 <= at < 120]) <= 6
    assert len([at for at in fetched if at >= 120 + 2 * TRIAL]) == 80 - 2 * TRIAL
    assert sum(waits) < 200 * compute_s / 2


# -- the engine


def test_a_rate_that_is_set_is_not_measured():
    rate = PrefillRate(100.0)
    assert not rate.measures
    assert (rate.tokens_per_s, rate.seconds(50)) == (100.0, 0.5)
    off = PrefillRate(0.0)
    assert (off.measures, off.tokens_per_s, off.seconds(50)) == (False, 0.0, 0.0)


def test_the_rate_is_that_of_the_engine_not_of_a_request():
    """Requests that are computed together end together; one that waits for them has no part in
    their time, nor has an engine without work."""
    rate, now = PrefillRate(None), 0.0
    for _ in range(10):
        ready = now
        now += 0.4
        rate.computed(3000, ready, now)
        rate.computed(1000, ready, now)
        now += 0.1
        rate.computed(1000, ready, now)
        now += 7.0
    assert rate.tokens_per_s == pytest.approx(10_000, rel=0.02)
    assert rate.seconds(500) == pytest.approx(0.05, rel=0.02)


def test_an_engine_that_computes_nothing_is_not_measured():
    rate = PrefillRate(None)
    for at in range(10_000):
        rate.computed(64, float(at), at + PREFILL_MEASURED_S / 200)
    assert rate.tokens_per_s == 0.0
    assert rate.seconds(64) == 0.0
