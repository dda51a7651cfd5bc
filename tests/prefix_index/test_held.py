"""Lines: requests that wait, holding nothing."""

from __future__ import annotations

from kvactors.prefix_index.messages import Pause, Resume
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
