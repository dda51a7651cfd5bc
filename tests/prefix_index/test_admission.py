"""Admission: the requests that wait, the number of their blocks, and the evictions for them."""

from __future__ import annotations

from typing import Any

from kvactors.cpu_evictor.messages import Offload
from kvactors.errors import NoRoom
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import Proceed
from kvactors.prefix_index.waiting import TURN_REQUESTS, Wait, WaitQueue
from tests.prefix_index.objects import Request, answers, cache, core, effects_of


class Taker:
    """A request, and the blocks that it gets."""

    def __init__(self, lease: int, needed: int) -> None:
        self.lease, self.needed = lease, needed
        self.given: list[int] | None = None
        self.gone = False
        self.wait = Wait(lease, Request(), needed=needed, give_up=self.give_up)

    def give_up(self) -> None:
        self.gone = True


def ask(state: PrefixIndex, taker: Taker, *, wait: bool = True) -> tuple[bool, list[Any]]:
    def complete() -> None:
        taker.given = state.index.take(taker.needed)

    taker.wait.complete = complete
    state.out.take()
    state.queue.request(taker.wait, may_wait=wait, deadline=5.0)
    accepted = taker.given is not None or taker.lease in state.queue.waiting
    return accepted, state.out.take()


def releasing(state: PrefixIndex) -> WaitQueue:
    """Blocks of ended leases are on their way back: requests may wait for them."""
    state.index.closing = 1
    return state.queue


def test_the_last_request_is_refused_once_no_block_can_become_free():
    state = core(4)
    admission = releasing(state)
    first, last = Taker(1, 3), Taker(2, 2)
    state.index.take(4)
    ask(state, first)
    ask(state, last)
    state.index.closing = 0
    state.index.pool.give([0, 1, 2])
    [error] = answers(effects_of(admission.serve))
    assert isinstance(error, NoRoom)
    assert (first.given is not None, last.gone) == (True, True)
    assert state.index_statistics().no_room == 1


def test_a_turn_serves_a_bounded_number_of_requests():
    state = core(2 * TURN_REQUESTS)
    admission = releasing(state)
    held = state.index.take(2 * TURN_REQUESTS)
    takers = [Taker(number, 1) for number in range(2 * TURN_REQUESTS)]
    for taker in takers:
        ask(state, taker)
    state.index.pool.give(held)
    assert [type(one) for one in effects_of(admission.serve)] == [Proceed]
    assert sum(taker.given is not None for taker in takers) == TURN_REQUESTS
    late = Taker(2 * TURN_REQUESTS, 1)
    ask(state, late)
    assert late.given is None, "a request overtook those that the last turn did not serve"
    admission.proceed()
    admission.serve()
    assert all(taker.given for taker in takers)


def test_eviction_ahead_of_need_starts_below_the_low_watermark():
    state = core(6, free_low=2, free_high=4)
    cache(state, 4)
    assert effects_of(state.queue.evict_to_watermark) == []
    state.index.take(1)
    [offload] = effects_of(state.queue.evict_to_watermark)
    assert isinstance(offload, Offload)
    assert len(offload.blocks) == 3
    assert effects_of(state.queue.evict_to_watermark) == [], "blocks being freed count"
