"""Clears: those that wait for the store, and those that a restarted host tier is sent again."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from kvactors.cpu_evictor.messages import ClearHost
from kvactors.errors import StoreError
from kvactors.prefix_index.clears import Clears
from kvactors.prefix_index.messages import Ack
from tests.prefix_index.objects import Request, answers, messages


def test_without_the_store_a_clear_is_answered_at_once():
    clears = Clears(count(1))
    actions = clears.start(Request(), 3, storage=False)
    assert isinstance(actions[0], ClearHost)
    assert answers(actions)[0].count == 3
    assert clears.sent == 1
    assert clears.again() == []


def test_with_the_store_it_is_answered_when_the_store_is_empty_or_could_not_be_emptied():
    clears = Clears(count(1))
    ops = []
    for freed in (3, 4):
        [clear] = clears.start(Request(), freed, storage=True)
        ops.append(clear.op)
    [done] = answers(clears.finish(ops[1], ""))
    assert isinstance(done, Ack)
    assert done.count == 4
    [error] = answers(clears.finish(ops[0], "the disk is full"))
    assert isinstance(error, StoreError)
    assert "the disk is full" in str(error)
    assert clears.finish(ops[0], "") == []


def test_a_restarted_host_tier_is_sent_the_clears_without_an_answer():
    clears = Clears(count(1))
    clears.start(Request(), 0, storage=False)
    [clear] = clears.start(Request(), 0, storage=True)
    clears.host_lost()
    assert clears.sent == 0
    [again] = messages(clears.again())
    assert (again.op, again.storage, clears.sent) == (clear.op, True, 1)
    assert answers(clears.finish(clear.op, ""))


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 3), st.booleans()), max_size=12),
    st.integers(0, 12),
    st.integers(0, 3),
    st.booleans(),
)
def test_a_prompt_is_hidden_by_clears_of_its_salt_and_of_all_that_are_on_their_way(
    sent, handled, salt, lost
):
    """With a loss of the host tier, those that wait for the store are all that is sent again."""
    clears = Clears(count(1))
    for one, storage in sent:
        if one is None:
            clears.start(Request(), 0, storage=storage)
        else:
            clears.start_salt(one)
    pending = [one for one, _ in sent[handled:]]
    if lost:
        clears.host_lost()
        clears.again()
        pending = [one for one, storage in sent if one is None and storage]
        handled = 0
    assert clears.reaches(salt, min(handled, clears.sent)) == any(
        one in (None, salt) for one in pending
    )


def test_with_many_clears_on_their_way_each_prompt_counts_as_cleared():
    clears = Clears(count(1))
    for _ in range(65):
        clears.start_salt(1)
    assert clears.reaches(2, 0)
    assert not clears.reaches(2, 1)
