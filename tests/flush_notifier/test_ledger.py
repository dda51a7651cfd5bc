"""The ledger: random histories against a naive model, and the form of the tasks of single ones."""

from __future__ import annotations

import pytest

from kvactors.actor.sliced import finish
from kvactors.flush_notifier.messages import PathCached
from kvactors.flush_notifier.view import PATHS
from kvactors.types import Reason, Residency, Tier, join_hashes
from tests.flush_notifier.helpers import (
    EVERYTHING,
    NODE,
    PER_TIER,
    ROOT,
    announced,
    delivered,
    do,
    held,
    ledger,
    names,
    path,
    refused,
    settle,
    take,
)
from tests.flush_notifier.ledger_model import HOST_ALONE, Model, Settings, walk

RESIDENT, GONE = Residency.RESIDENT, Residency.GONE


def shape(tasks):
    return [(task.residency, task.tier, task.start_block_idx, task.count) for task in tasks]


# -- any history


@pytest.mark.parametrize("seed", range(80))
def test_random_walks_with_small_limits(seed):
    walk(seed, 600)


def test_the_walks_forget_and_interleave():
    """The walks would prove nothing if these did not happen."""
    walks = [walk(seed, 600) for seed in range(10)]
    assert sum(model.forgotten for model in walks) > 50
    assert len({model.settings for model in walks}) == 10
    assert {model.settings.idle_limit for model in walks} & {1, 2, 3}


def test_a_removal_takes_the_gain_of_the_same_block_along():
    """The removal of block 2 goes with that of block 1, the oldest difference. Block 2 must be on
    the host by then: block 3 stays. No walk is likely to come here."""
    model = Model(Settings((EVERYTHING,), idle_limit=100, takes_clear=()))

    def deliver(limit: int) -> None:
        while model.book.sinks[0].pending:
            model.take(0, limit)
            model.end(0, answered=True, arrived=0)
            model.complete()

    model.announce((1, 2, 3), 0, 3, Tier.DEVICE)
    model.announce((9,), 0, 1, Tier.DEVICE)
    model.gain((1,), Tier.HOST)
    model.announce((1, 2, 3), 2, 1, Tier.STORAGE)
    model.lose((1, 2, 3), 1, Tier.DEVICE)
    deliver(100)
    model.lose((1,), 1, Tier.HOST)
    model.lose((9,), 1, Tier.DEVICE)
    model.announce((1, 2), 1, 1, Tier.HOST)
    model.lose((1, 2), 1, Tier.DEVICE)
    deliver(1)
    assert [model.mirrors[0][key] for key in names(1, 2, 3)] == [1, 2, 4]


# -- tasks


def test_eviction_gives_one_task_a_run_with_the_complete_path_and_depth_minus_one():
    book = ledger()
    do(book.announce(announced(1, 2, 3, 4)))
    settle(book)
    do(
        book.lose(join_hashes(reversed(names(1, 2, 3, 4)[2:])), Tier.DEVICE, Reason.CPU_EVICTION)
    )  # leaves first
    (task,) = settle(book)
    assert (task.residency, task.start_block_idx, task.count, task.reason) == (
        GONE,
        2,
        2,
        Reason.CPU_EVICTION,
    )
    assert task.tokens == path(1, 2, 3, 4)[0]
    assert (task.hashes, task.parent) == (join_hashes(names(1, 2, 3, 4)[2:]), names(1, 2)[-1])


def test_a_branch_point_splits_runs_and_children_go_before_parents():
    book = ledger()
    do(book.announce(announced(1, 2, 3)))
    do(book.announce(announced(1, 2, 4, 5, start=2)))
    gains = settle(book)
    assert [(t.start_block_idx, t.count) for t in gains] == [(0, 2), (2, 1), (2, 2)], (
        "parents come before children"
    )
    do(book.clear(Tier.DEVICE, Reason.CLEAR))
    assert [(t.start_block_idx, t.count) for t in settle(book)] == [(2, 2), (2, 1), (0, 2)]


def test_runs_split_where_the_reason_changes_and_each_tier_keeps_its_own():
    book = ledger()
    do(book.announce(announced(1, 2, 3)))
    settle(book)
    do(book.gain(join_hashes(names(1, 2, 3)[1:]), Tier.HOST, Reason.OFFLOAD))
    do(book.lose(names(1, 2, 3)[2], Tier.DEVICE, Reason.DEVICE_EVICTION))
    do(book.lose(names(1, 2, 3)[1], Tier.DEVICE, Reason.CORRUPT))
    tasks = settle(book)
    assert shape(tasks) == [
        (RESIDENT, Tier.HOST, 1, 2),
        (GONE, Tier.DEVICE, 2, 1),
        (GONE, Tier.DEVICE, 1, 1),
    ]
    assert [task.reason for task in tasks] == [
        Reason.OFFLOAD,
        Reason.DEVICE_EVICTION,
        Reason.CORRUPT,
    ]


def test_a_reason_is_that_of_the_block_above_which_it_waited_for():
    book = ledger()
    do(book.announce(announced(1, 2, 3)))
    settle(book)
    do(book.lose(names(1)[0], Tier.DEVICE, Reason.CORRUPT))
    (task,) = settle(book)
    assert (task.start_block_idx, task.count, task.reason) == (0, 3, Reason.CORRUPT)


@pytest.mark.parametrize("view", [EVERYTHING, NODE, HOST_ALONE])
def test_divergence_counts_a_wrong_view_and_no_blocks_that_cannot_be_announced(view):
    book = ledger(view)
    do(book.announce(announced(1, 2, 3)))
    do(book.gain(names(1, 2, 3)[2], Tier.HOST, Reason.OFFLOAD))
    settle(book)
    do(book.lose(names(1)[0], Tier.DEVICE, Reason.CORRUPT))
    settle(book)
    tiers = {Tier.DEVICE: set(names(1, 2, 3)[1:]), Tier.HOST: set(names(1, 2, 3)[2:])}
    assert not finish(book.divergence_steps(book.sinks[0], None, tiers))
    for wrong in (names(1, 2)[1], bytes(32)):  # the ledger has no entry of the second
        mirror = {Tier.DEVICE: {wrong}}
        assert len(finish(book.divergence_steps(book.sinks[0], mirror, tiers))) == 1


def test_a_very_large_subtree_goes_in_batches():
    book = ledger()
    for leaf in range(10, 60):
        do(book.announce(announced(1, 2, leaf, leaf)))
    settle(book)
    do(book.lose(names(1)[0], Tier.DEVICE, Reason.CORRUPT))
    assert sum(task.count for task in take(book, 0, 8, 1).tasks) <= 16


# -- pending tasks


def test_resident_then_gone_cancels():
    book = ledger()
    do(book.announce(announced(1, 2)))
    do(book.lose(path(1, 2)[1], Tier.DEVICE, Reason.DEVICE_DROP))
    assert settle(book) == []
    assert book.sinks[0].coalesced == 2


def test_gone_while_resident_is_in_flight_is_sent_afterwards():
    book = ledger()
    do(book.announce(announced(1)))
    batch = take(book, 0, 10, 1)
    do(book.lose(path(1)[1], Tier.DEVICE, Reason.DEVICE_DROP))
    assert book.sinks[0].coalesced == 0, "it did not vanish: the sink is hearing of it"
    delivered(book, 0, batch)
    assert shape(settle(book)) == [(GONE, Tier.DEVICE, 0, 1)]
    assert not held(book)


def test_a_batch_is_bounded_and_takes_gains_above_along():
    book = ledger()
    do(book.announce(announced(1, count=0)))
    do(book.announce(announced(1, 2, 3, start=1)))
    do(book.announce(announced(7, 8)))
    assert shape(take(book, 0, 2, 1).tasks) == [(RESIDENT, Tier.DEVICE, 0, 2)], (
        "the others wait for the block above them"
    )
    settle(book)
    do(book.gain(names(1)[0], Tier.DEVICE, Reason.COMMIT))
    assert shape(take(book, 0, 2, 1).tasks) == [(RESIDENT, Tier.DEVICE, 0, 3)]


@pytest.mark.parametrize("order", [list, reversed])
def test_a_batch_never_ends_within_a_run(order):
    book = ledger()
    do(book.announce(announced(*range(40))))
    do(book.announce(announced(99)))
    settle(book)
    do(book.lose(join_hashes(order(names(*range(40))[10:])), Tier.DEVICE, Reason.CPU_EVICTION))
    do(book.lose(names(99)[0], Tier.DEVICE, Reason.CPU_EVICTION))
    assert shape(take(book, 0, 4, 1).tasks) == [(GONE, Tier.DEVICE, 10, 30)]


def test_many_short_runs_deep_in_the_tree_are_sent_in_several_batches():
    book, trunk = ledger(), range(100, 150)
    do(book.announce(announced(*trunk)))
    for leaf in range(20):
        do(book.announce(announced(*trunk, leaf, start=50)))
    settle(book)
    for leaf in range(20):
        do(book.lose(names(*trunk, leaf)[-1], Tier.DEVICE, Reason.CPU_EVICTION))
    batches = []
    while book.sinks[0].pending:
        batches.append(take(book, 0, 64, 1))
        delivered(book, 0, batches[-1])
    assert sum(len(batch.tasks) for batch in batches) == 20
    assert len(batches) == 4
    assert all(sum(len(task.tokens) for task in batch.tasks) <= PATHS * 64 * 8 for batch in batches)


def test_a_path_with_tokens_missing_is_refused():
    book = ledger()
    tokens, keys = path(1, 2)
    with pytest.raises(ValueError, match="bytes of tokens do not match 2 block hashes"):
        do(
            book.announce(
                PathCached(ROOT, tokens[:-4], keys, 0, 2, Tier.DEVICE, Reason.COMMIT, ROOT)
            )
        )
    assert not len(book.tree)


# -- everything gone, to a sink that takes it as one


def test_a_full_clear_is_one_task_without_a_path():
    book = ledger(PER_TIER, PER_TIER, takes_clear=[1])
    do(book.announce(announced(1, 2, 3)))
    do(book.gain(path(1, 2)[1], Tier.HOST, Reason.OFFLOAD))
    settle(book, 0)
    settle(book, 1)
    do(book.clear(Tier.DEVICE, Reason.CLEAR))
    assert not book.sinks[1].clear_due, "the host holds some"
    do(book.clear(Tier.HOST, Reason.CLEAR))
    assert [task.count for task in settle(book, 0)] == [1, 2, 2], "run by run"
    assert [(task.count, task.tokens, task.residency, task.reason) for task in settle(book, 1)] == [
        (0, b"", Residency.GONE, Reason.CLEAR)
    ]
    assert not held(book, 1)
    book.check()


def test_a_restart_is_no_clear():
    book = ledger(PER_TIER, takes_clear=[0])
    do(book.announce(announced(1)))
    settle(book)
    do(book.clear(Tier.DEVICE, Reason.RESTART))
    assert [task.count for task in settle(book)] == [1]


# -- the barrier


def test_delivered_until_shows_how_far_the_deliveries_are():
    book = ledger()
    do(book.announce(announced(1)))
    mark = book.sinks[0].clock
    do(book.announce(announced(2)))
    assert book.sinks[0].delivered_until < mark
    batch = take(book, 0, 1, 1)
    refused(book, 0, batch)
    assert book.sinks[0].delivered_until < mark
    delivered(book, 0, take(book, 0, 1, 1))
    assert mark <= book.sinks[0].delivered_until < book.sinks[0].clock
    settle(book)
    assert book.sinks[0].delivered_until == book.sinks[0].clock


def test_a_change_during_its_delivery_began_later():
    book = ledger()
    do(book.announce(announced(1)))
    batch, mark = take(book, 0, 1, 1), book.sinks[0].clock
    do(book.lose(names(1)[0], Tier.DEVICE, Reason.DEVICE_DROP))
    delivered(book, 0, batch)
    assert book.sinks[0].pending == 1
    assert book.sinks[0].delivered_until == mark
