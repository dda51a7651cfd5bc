"""Clears: those that wait for the store, and those that a restarted host tier is sent again."""

from __future__ import annotations

from itertools import count

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
