"""Admission: the requests that wait, the number of their blocks, and the evictions for them."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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


class Queue:
    """A model: first come, first served, each gets the free blocks until it has all."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.waiting: deque[list[int]] = deque()  # (number, blocks lacking, blocks needed)
        self.given: list[int] = []

    def serve(self) -> None:
        while self.waiting:
            first = self.waiting[0]
            count = min(first[1], self.free)
            first[1] -= count
            self.free -= count
            if first[1]:
                return
            self.given.append(self.waiting.popleft()[0])

    def ask(self, number: int, needed: int) -> None:
        if not self.waiting and self.free >= needed:
            self.free -= needed
            self.given.append(number)
        else:
            self.waiting.append([number, needed, needed])
            self.serve()

    def end(self, number: int) -> None:
        for entry in [one for one in self.waiting if one[0] == number]:
            self.waiting.remove(entry)
            self.free += entry[2] - entry[1]
        self.serve()


STEP = st.tuples(st.sampled_from(["ask", "ask", "give", "cancel", "expire"]), st.integers(0, 9))


@given(st.lists(STEP, max_size=40))
def test_the_queue_agrees_with_a_model(steps):
    """Blocks that are private to leases come back in any order, and none is given twice."""
    state = core(8)
    admission, model = releasing(state), Queue(8)
    takers: list[Taker] = []
    ended: set[int] = set()
    for step, value in steps:
        if step == "ask":
            taker = Taker(len(takers), value % 6 + 1)
            takers.append(taker)
            assert ask(state, taker)[0]
            model.ask(taker.lease, taker.needed)
        elif step == "give":
            done = [one for one in takers if one.given is not None and one.lease not in ended]
            if done:
                one = done[value % len(done)]
                ended.add(one.lease)
                state.index.pool.give(one.given)
                model.free += one.needed
                admission.serve()
                model.serve()
        elif admission.waiting:
            number = sorted(admission.waiting)[value % len(admission.waiting)]
            taker = takers[number]
            if step == "cancel":
                assert answers(effects_of(admission.cancel, number, "gone"))
                admission.serve()
            else:
                assert answers(effects_of(admission.expire, taker.wait))
            assert taker.gone
            assert taker.wait.timer is None
            model.end(number)
        given = [one.lease for one in takers if one.given is not None]
        assert sorted(given) == sorted(model.given)
        assert list(admission.waiting) == [one[0] for one in model.waiting]
        assert state.index.promised == sum(one[1] for one in model.waiting)
        assert state.index.free == model.free
        holding = [one for one in takers if one.lease not in ended and not one.gone]
        owned = [block for one in holding for block in one.given or ()]
        assert len(set(owned)) == len(owned)
