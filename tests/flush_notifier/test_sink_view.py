"""SinkView: the difference of one sink from what is due, and its batches."""

from __future__ import annotations

from kvactors.actor.sliced import finish
from kvactors.types import Reason, Residency, Tier
from tests.flush_notifier.helpers import announced, do, ledger, names, path

EPOCH = 1


def bench(*branch: int):
    """A ledger of one sink, whose path is due, and the sink's view."""
    book = ledger()
    do(book.announce(announced(*branch)))
    return book, book.sinks[0]


def take(view, limit: int = 100):
    return finish(view.take(limit, EPOCH))


def acknowledged(view) -> set[bytes]:
    return {block.hash for block in view.held_blocks()}


def lose(book, *branch: int) -> None:
    do(book.lose(path(*branch)[1], Tier.DEVICE, Reason.DEVICE_DROP))


def test_what_is_due_differs_until_it_is_delivered():
    _, view = bench(1, 2)
    assert (view.pending, view.clock, view.delivered_until) == (2, 2, 0)
    batch = take(view)
    assert [(task.count, task.residency) for task in batch.tasks] == [(2, Residency.RESIDENT)]
    assert acknowledged(view) == set()
    finish(view.delivered(batch))
    assert (view.pending, view.delivered_until) == (0, 2)
    assert acknowledged(view) == set(names(1, 2))


def test_a_difference_that_ends_before_it_is_sent_coalesces():
    book, view = bench(1)
    lose(book, 1)
    assert (view.pending, view.coalesced) == (0, 1)
    assert take(view).tasks == []


def test_a_block_removed_while_it_is_in_flight_is_retracted_next():
    book, view = bench(1, 2)
    batch = take(view)
    lose(book, 1, 2)
    finish(view.delivered(batch))
    (task,) = take(view).tasks
    assert task.residency is Residency.GONE
    assert (task.hashes, view.pending) == (path(1, 2)[1], 2)


def test_a_refused_batch_is_sent_again_and_may_have_arrived():
    book, view = bench(1)
    finish(view.refused(take(view)))
    assert view.pending == 1
    lose(book, 1)
    assert [task.residency for task in take(view).tasks] == [Residency.GONE], (
        "the sink may have applied the batch it did not acknowledge"
    )


def test_a_batch_has_about_the_limit_of_blocks_and_the_oldest_difference_first():
    book, view = bench(1)
    do(book.announce(announced(2)))
    do(book.announce(announced(3)))
    first = take(view, 2)
    assert {task.hashes for task in first.tasks} == {path(1)[1], path(2)[1]}
    finish(view.delivered(first))
    assert view.delivered_until == 2


def test_after_a_reset_everything_due_is_sent_again():
    _, view = bench(1, 2)
    finish(view.delivered(take(view)))
    finish(view.reset())
    assert (acknowledged(view), view.pending) == (set(), 2)


def test_a_repetition_sends_the_view_again_and_removes_nothing():
    _, view = bench(1, 2)
    finish(view.delivered(take(view)))
    finish(view.repeat())
    assert acknowledged(view) == set(names(1, 2))
    assert [task.residency for task in take(view).tasks] == [Residency.RESIDENT]


def test_held_blocks_come_after_their_parents():
    _, view = bench(1, 2, 3)
    finish(view.delivered(take(view)))
    assert [one.hash for one in view.held_blocks()] == names(1, 2, 3)
    assert [one.position for one in view.held_blocks()] == [0, 1, 2]


def test_blocks_outside_the_view_are_listed_on_request():
    _, view = bench(1)
    assert list(view.held_blocks()) == []
    assert [one.tiers for one in view.held_blocks(every=True)] == [0]
