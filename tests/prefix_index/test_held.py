"""Lines: requests that wait, holding nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvactors.prefix_index.messages import Pause, Resume
from kvactors.prefix_index.waiting import Line, Wait
from tests.prefix_index.objects import Request, StartTimer, acquire, core, effects_of


def test_a_held_request_has_a_timer_until_it_is_admitted():
    state, message = core(4), acquire(1, 2)
    state.pause(Pause(), Request())
    [timer] = effects_of(state.acquire, message, Request(message))
    assert isinstance(timer, StartTimer)
    assert timer.deadline == message.deadline
    state.admit_waiting()
    assert len(state.queue.held) == 1, "during a pause"
    state.resume(Resume(), Request())
    assert timer.operation.timer is None
    assert (len(state.queue.held), len(state.leases)) == (0, 1)


@given(st.permutations(range(6)), st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_requests_wait_in_the_order_of_their_calls(numbers, steps):
    line, model = Line(), set()
    for number in numbers:
        line.enter(Wait(number, Request(acquire(number, 1)), claim=number, since=number))
        model.add(number)
        assert list(line.waits) == sorted(model)
        assert line.claims == sum(model)
    for again, number in steps:
        if number not in model:
            continue
        assert line.remove(number).lease == number
        model.discard(number)
        if again:
            line.enter(Wait(number, Request(acquire(number, 1)), claim=number, since=99))
            model.add(number)
        assert (list(line.waits), line.claims) == (sorted(model), sum(model))
