"""Clears: those that wait for the store, and those that a restarted host tier is sent again."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from kvactors.cpu_evictor.messages import HostCleared
from kvactors.errors import StoreError
from kvactors.prefix_index.host import TreeClears
from kvactors.prefix_index.messages import Ack
from tests.prefix_index.objects import RecordedIndexEffects, Request, answers, effects_of


def started(clears, *, freed=0, storage=False, salt=None):
    """A clear whose device part is done, and its answers so far."""
    request = Request()
    [clear] = effects_of(clears.start, request, salt, storage=storage)
    return clear, answers(effects_of(clears.device_cleared, clear.op, request, freed))


def test_with_the_store_it_is_answered_when_the_store_is_empty_or_could_not_be_emptied():
    clears = TreeClears(RecordedIndexEffects(), count(1))
    ops = [started(clears, freed=freed, storage=True)[0].op for freed in (3, 4)]
    [done] = answers(effects_of(clears.finish, HostCleared(ops[1], "", 5)))
    assert isinstance(done, Ack)
    assert (done.count, done.unknown) == (4, 5)
    [error] = answers(effects_of(clears.finish, HostCleared(ops[0], "the disk is full")))
    assert isinstance(error, StoreError)
    assert "the disk is full" in str(error)
    assert effects_of(clears.finish, HostCleared(ops[0], "")) == []


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
    clears = TreeClears(RecordedIndexEffects(), count(1))
    for one, storage in sent:
        clears.start(Request(), one, storage=storage)
    pending = [one for one, _ in sent[handled:]]
    if lost:
        clears.again()
        pending = [one for one, storage in sent if storage]
        handled = 0
    assert clears.reaches(salt, min(handled, clears.sent)) == any(
        one in (None, salt) for one in pending
    )


def test_with_many_clears_on_their_way_each_prompt_counts_as_cleared():
    clears = TreeClears(RecordedIndexEffects(), count(1))
    for _ in range(65):
        clears.start(Request(), 1, storage=False)
    assert clears.reaches(2, 0)
    assert not clears.reaches(2, 1)
