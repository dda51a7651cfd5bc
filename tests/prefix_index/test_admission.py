"""Admission: the requests that wait, the number of their blocks, and the evictions for them."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvactors.cpu_evictor.messages import Offload
from kvactors.errors import DeadlineExceeded, LeaseEnded, NoRoom
from kvactors.gpu_swapper.messages import DataPlaneStatus
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import AdmissionDeadline, Proceed
from kvactors.prefix_index.waiting import TURN_REQUESTS, Wait, WaitQueue
from kvactors.prefix_index.work import NextSlice
from tests.prefix_index.objects import (
    Request,
    StartTimer,
    answers,
    cache,
    core,
    effects_of,
    messages,
    work_of,
)


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
        taker.given = state.index.take_reserved(taker.needed)

    taker.wait.complete = complete
    state.out.take()
    accepted = state.queue.request(taker.wait, may_wait=wait, deadline=5.0)
    return accepted, state.out.take()


def releasing(state: PrefixIndex) -> WaitQueue:
    """Blocks of ended leases are on their way back: requests may wait for them."""
    state.index.closing = 1
    return state.queue


def test_free_blocks_are_given_at_once():
    state = core(4)
    taker = Taker(1, 3)
    assert ask(state, taker) == (True, [])
    assert taker.given is not None
    assert len(taker.given) == 3
    assert state.index.free == 1


def test_a_request_for_more_than_can_be_freed_is_refused_and_changes_nothing():
    state = core(4)
    cache(state, 2)
    taker = Taker(1, 5)
    assert ask(state, taker) == (False, [])
    assert state.index.free == 2
    assert state.evictions.evicted == 0


def test_a_request_waits_for_the_copies_of_evicted_blocks():
    state = core(4)
    cache(state, 3)
    taker = Taker(1, 3)
    accepted, actions = ask(state, taker)
    [offload, timer] = actions
    assert accepted
    assert isinstance(offload, Offload)
    assert isinstance(timer, StartTimer)
    assert (timer.operation, timer.deadline) == (taker.wait, 5.0)
    assert state.index.reserved == 1
    assert state.index.promised == 2
    state.evictions.finish(offload.op, b"\1\1")
    assert effects_of(state.queue.serve) == []
    assert taker.given is not None
    assert len(set(taker.given)) == 3
    assert taker.wait.timer is None
    assert not state.queue.waiting


def test_a_request_that_must_not_wait_is_refused_after_it_began_to_evict():
    state = core(4)
    cache(state, 3)
    accepted, actions = ask(state, Taker(1, 3), wait=False)
    assert not accepted
    assert [type(one) for one in actions] == [Offload]
    assert not state.queue.waiting


def test_no_request_overtakes_the_queue():
    state = core(4)
    admission = releasing(state)
    first, second = Taker(1, 5), Taker(2, 1)
    ask(state, first)
    ask(state, second)
    assert second.given is None, "a small request took blocks that were promised"
    [refusal] = effects_of(admission.cancel, 1, "gone")
    assert first.gone
    assert isinstance(refusal.error, LeaseEnded)
    admission.serve()
    assert second.given is not None


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


def test_a_deadline_ends_the_wait_that_it_belongs_to():
    state = core(2)
    admission = releasing(state)
    taker = Taker(1, 3)
    _, actions = ask(state, taker)
    [timer] = [one for one in actions if isinstance(one, StartTimer)]
    assert isinstance(timer.message, AdmissionDeadline)
    assert effects_of(admission.expire, 1, timer.message.ticket + 1) == []
    [error] = answers(effects_of(admission.expire, 1, timer.message.ticket))
    assert isinstance(error, DeadlineExceeded)
    assert "1 lacking" in str(error)
    assert state.index.free == 2


def test_a_cancelled_request_is_skipped():
    state = core(2)
    admission = releasing(state)
    gone, next_one = Taker(1, 3), Taker(2, 2)
    ask(state, gone)
    ask(state, next_one)
    gone.wait.envelope.cancel()  # type: ignore[attr-defined]
    admission.serve()
    assert (gone.gone, gone.given) == (True, None)
    assert next_one.given is not None


def test_reserved_blocks_stay_free_and_are_not_given_to_others():
    state = core(4)
    state.index.reserved = 3
    assert state.index.free == 1
    assert ask(state, Taker(2, 2))[0] is False
    assert len(state.index.take_reserved(3)) == 3


def test_stalled_copies_are_not_waited_for():
    state = core(6)
    cache(state, 3)
    cache(state, 3, first=100)
    waiting = Taker(1, 3)
    ask(state, waiting)
    assert waiting.given is None
    [offload] = messages(effects_of(state.data_plane_status, DataPlaneStatus(False, False, 0)))
    assert isinstance(offload, Offload)
    state.evictions.finish(offload.op, bytes(3))
    state.queue.serve()
    assert waiting.given is not None


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


def test_blocks_of_a_clear_come_back_in_later_turns():
    state = core(4)
    cache(state, 4)
    state.index.retire()
    [sweep] = effects_of(state.queue.serve)
    assert effects_of(state.queue.serve) == [], "one turn of it is in the mailbox already"
    assert [type(one) for one in work_of(state.out, sweep.work)] == [NextSlice]
    assert state.index.pool.free == 4


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
                assert answers(effects_of(admission.expire, number, taker.wait.ticket))
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
