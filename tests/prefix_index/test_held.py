"""HeldRequests: requests of a paused cache."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from kvactors.prefix_index.actions import StartTimer
from kvactors.prefix_index.held import HeldRequests
from kvactors.prefix_index.messages import AdmissionDeadline
from tests.prefix_index.objects import Request, acquire


def test_a_held_request_has_a_timer_until_it_is_taken():
    held = HeldRequests(count(1))
    held.paused = True
    message = acquire(1, 2)
    timer = held.hold(message, Request(message))
    assert isinstance(timer, StartTimer)
    assert (timer.deadline, timer.operation.over) == (message.deadline, False)
    assert held.take_next() is None, "during a pause"
    held.paused = False
    taken = held.take_next()
    assert taken is timer.operation
    assert taken.over
    assert held.take_next() is None


def test_a_timer_of_an_earlier_wait_changes_nothing():
    held = HeldRequests(count(1))
    tickets = []
    for _ in range(2):
        timer = held.hold(acquire(1, 2), Request())
        assert isinstance(timer, StartTimer)
        assert isinstance(timer.message, AdmissionDeadline)
        tickets.append(timer.message.ticket)
        if len(tickets) == 1:
            held.remove(1)
    assert held.expire(1, tickets[0]) is None
    assert held.expire(1, tickets[1]) is not None
    assert held.remove(1) is None


@given(st.lists(st.tuples(st.sampled_from(["hold", "take", "cancel"]), st.integers(0, 3))))
def test_requests_leave_in_the_order_they_came(steps):
    held, model, number = HeldRequests(count(1)), [], 0
    for step, which in steps:
        if step == "hold":
            number += 1
            held.hold(acquire(number, 1), Request())
            model.append(number)
        elif step == "take":
            taken = held.take_next()
            assert (taken and taken.message.lease) == (model.pop(0) if model else None)
        elif model:
            lease = model.pop(which % len(model))
            assert held.remove(lease).message.lease == lease
        assert list(held.requests) == model
