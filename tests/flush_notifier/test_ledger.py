"""The ledger after single histories: tasks, runs, views, and the entries it forgets."""

from __future__ import annotations

import pytest

from kvactors.flush_notifier.messages import PathCached
from kvactors.flush_notifier.view import PATHS
from kvactors.types import Reason, Residency, Tier, join_hashes
from tests.flush_notifier.helpers import (
    AT_FINISH,
    NODE,
    PER_TIER,
    ROOT,
    announced,
    delivered,
    do,
    finished,
    held,
    known,
    ledger,
    names,
    path,
    refused,
    settle,
    take,
)

RESIDENT, GONE = Residency.RESIDENT, Residency.GONE


def shape(tasks):
    return [(task.residency, task.tier, task.start_block_idx, task.count) for task in tasks]


# -- tasks


def test_request_finish_gives_the_whole_path_from_block_0():
    book = ledger(AT_FINISH)
    do(book.announce(announced(1, 2, 3)))
    assert settle(book) == []
    do(book.announce(finished(1, 2, 3)))
    (task,) = settle(book)
    assert (task.residency, task.start_block_idx, task.count, task.reason) == (
        RESIDENT,
        0,
        3,
        Reason.REQUEST_FINISH,
    )
    assert (task.tokens, task.hashes, task.parent, task.epoch) == (*path(1, 2, 3), ROOT, 1)


def test_losses_are_due_at_once_and_a_gain_on_another_tier_once_finished():
    book = ledger(AT_FINISH)
    do(book.announce(finished(1)))
    settle(book)
    do(book.gain(path(1)[1], Tier.HOST, Reason.OFFLOAD))
    do(book.lose(path(1)[1], Tier.DEVICE, Reason.DEVICE_EVICTION))
    assert shape(settle(book)) == [(RESIDENT, Tier.HOST, 0, 1), (GONE, Tier.DEVICE, 0, 1)]


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


# -- views


def test_a_node_view_is_gone_only_when_every_tier_is():
    book = ledger(NODE)
    do(book.announce(announced(1)))
    assert shape(settle(book)) == [(RESIDENT, Tier.DEVICE, 0, 1)]
    do(book.gain(path(1)[1], Tier.HOST, Reason.OFFLOAD))
    do(book.lose(path(1)[1], Tier.DEVICE, Reason.DEVICE_EVICTION))
    assert settle(book) == []
    do(book.lose(path(1)[1], Tier.HOST, Reason.CPU_EVICTION))
    (task,) = settle(book)
    assert (task.residency, task.tier, task.reason) == (GONE, Tier.DEVICE, Reason.CPU_EVICTION)


def test_a_sink_is_sent_only_its_tiers():
    book = ledger(PER_TIER)
    do(book.announce(announced(1, tier=Tier.STORAGE)))
    assert book.sinks[0].pending == 0
    do(book.gain(path(1)[1], Tier.HOST, Reason.LOAD))
    assert shape(settle(book)) == [(RESIDENT, Tier.HOST, 0, 1)]


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


@pytest.mark.parametrize("still_resident", [True, False])
def test_a_sink_whose_answer_was_lost_is_sent_its_state_again(still_resident):
    book = ledger()
    do(book.announce(announced(1)))
    batch = take(book, 0, 10, 1)
    if not still_resident:
        do(book.lose(path(1)[1], Tier.DEVICE, Reason.DEVICE_DROP))
    refused(book, 0, batch)
    book.check()
    (task,) = settle(book)
    assert task.residency is (RESIDENT if still_resident else GONE)
    assert settle(book) == []


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


def test_blocks_below_a_path_that_was_not_sent_get_their_entries_when_it_is():
    """A new incarnation of the notifier gets a commit before the announcement of what was resident
    at its start."""
    book = ledger()
    do(book.announce(announced(1, 2, 3, start=1)))
    assert (len(book.orphans.tiers), settle(book)) == (2, [])
    book.check()
    do(book.announce(announced(1, 2, 3)))
    assert not book.orphans.tiers
    (task,) = settle(book)
    assert (task.start_block_idx, task.count, task.tokens) == (0, 3, path(1, 2, 3)[0])


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


# -- remembered entries


def test_an_orphan_that_goes_is_forgotten():
    book = ledger()
    do(book.gain(join_hashes(names(1, 2)), Tier.HOST, Reason.LOAD))
    do(book.lose(names(1)[0], Tier.HOST, Reason.CPU_EVICTION))
    do(book.clear(Tier.HOST, Reason.CLEAR))
    assert book.orphans.tiers == {}


@pytest.mark.parametrize("first", ["path", "names"])
def test_a_path_may_name_blocks_of_other_tiers_before_or_after_their_reports(first):
    book = ledger()
    facts = [
        lambda: do(book.announce(announced(1, 2, 3, count=1))),
        lambda: do(book.gain(join_hashes(names(1, 2, 3)[1:]), Tier.HOST, Reason.OFFLOAD)),
    ]
    for fact in facts if first == "path" else reversed(facts):
        fact()
        book.check()
    assert shape(settle(book)) == [(RESIDENT, Tier.DEVICE, 0, 1), (RESIDENT, Tier.HOST, 1, 2)]


def test_entries_are_bounded_by_the_resident_blocks_and_the_limbo():
    book = ledger(idle_limit=10)
    do(book.announce(announced(0, 0, 0)))
    for i in range(1, 50):
        do(book.announce(announced(i, i, i)))
        settle(book)
        do(book.lose(join_hashes(reversed(names(i, i, i))), Tier.DEVICE, Reason.DEVICE_DROP))
        settle(book)
        book.check()
    assert len(book.tree) <= 3 + 10
    assert set(names(0, 0, 0)) <= known(book)


def test_the_ledger_keeps_one_entry_for_each_block_of_a_failed_sink():
    book = ledger(idle_limit=1)
    for _ in range(50):
        do(book.announce(announced(1, 2, 3)))
        do(book.lose(path(1, 2, 3)[1], Tier.DEVICE, Reason.DEVICE_DROP))
    assert book.sinks[0].pending == 0
    assert len(book.tree) <= 3


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


@pytest.mark.parametrize("answered", [True, False])
def test_blocks_that_return_while_a_clear_is_sent_are_sent_again(answered):
    book = ledger(PER_TIER, takes_clear=[0])
    do(book.announce(announced(1, 2, 3)))
    settle(book)
    do(book.clear(Tier.DEVICE, Reason.CLEAR))
    batch = take(book, 0, 100, 1)
    do(book.announce(announced(1, 2)))
    delivered(book, 0, batch) if answered else refused(book, 0, batch)
    book.check()
    tasks = [*settle(book), *settle(book)]
    assert [task.count for task in tasks] == ([2] if answered else [0, 2])
    assert held(book) == dict.fromkeys(names(1, 2), int(Tier.DEVICE))
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
