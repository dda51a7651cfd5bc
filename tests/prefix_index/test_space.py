"""Requests that wait until others release device blocks, compared with a queue in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvactors.errors import DeadlineExceeded, NeverFits, NoRoom
from kvactors.native import Path
from kvactors.prefix_index import waiting as queues
from kvactors.prefix_index.messages import Abandon, Acquire, Extend, Finish, Preempt, Proceed
from kvactors.prefix_index.work import NextSlice
from tests.prefix_index.objects import (
    BLOCK,
    Request,
    StartTimer,
    acquire,
    answers,
    core,
    effects_of,
    work_of,
)
from tests.support.effects import Refusal, Reply

which = st.integers(0, 20)


class QueueMachine(RuleBasedStateMachine):
    """Requests without a common prefix and without a tier below, so that blocks are free or in use.
    The model: `held` has the blocks of each lease, `queue` the requests that wait, `since` the
    overtakings when each began to wait."""

    @initialize(
        blocks=st.integers(1, 6), part=st.sampled_from([1, 2, 100]), bound=st.integers(0, 3)
    )
    def start(self, blocks: int, part: int, bound: int) -> None:
        self.bound = pytest.MonkeyPatch()
        self.bound.setattr(queues, "OVERTAKEN", bound)
        self.core = core(blocks, part=part, host_tier=False, announce=False)
        self.total = blocks
        self.held: dict[int, int] = {}
        self.queue: dict[int, int] = {}
        self.expected: dict[int, str] = {}
        self.found: dict[int, str] = {}
        self.asked: dict[int, Request] = {}
        self.waits: dict[int, Any] = {}
        self.number = self.overtakings = 0
        self.since: dict[int, int] = {}

    def teardown(self) -> None:
        if hasattr(self, "bound"):
            self.bound.undo()

    @property
    def free(self) -> int:
        return self.total - sum(self.held.values())

    def may_get(self, blocks: int, waiting: list[int]) -> bool:
        """Whether a request gets its blocks before those of `waiting`, and counts that."""
        if blocks > self.free:
            return False
        if waiting and self.overtakings - self.since[waiting[0]] >= queues.OVERTAKEN:
            newer = sum(held for lease, held in self.held.items() if lease > waiting[0])
            if blocks + newer + sum(self.queue[lease] for lease in waiting) > self.total:
                return False
        self.overtakings += bool(waiting)
        return True

    def serve(self) -> None:
        """The model admits in order, past requests that do not fit."""
        waiting: list[int] = []
        for lease, blocks in list(self.queue.items()):
            if self.may_get(blocks, waiting):
                del self.queue[lease]
                self.held[lease] = blocks
                self.expected[lease] = "granted"
            else:
                waiting.append(lease)

    def run(self, effects: list[Any]) -> None:
        """Note the answers, and do all work that follows."""
        pending = list(effects)
        while pending:
            action = pending.pop(0)
            if isinstance(action, (Reply, Refusal)) and isinstance(
                action.envelope.message, Acquire
            ):
                lease = action.envelope.message.lease
                ended = isinstance(action, Reply)
                self.found[lease] = "granted" if ended else type(action.error).__name__  # type: ignore[union-attr]
            elif isinstance(action, StartTimer):
                self.waits[action.message.wait.lease] = action.message.wait  # type: ignore[attr-defined]
            elif isinstance(action, NextSlice):
                pending += work_of(self.core.out, action.work)
            elif isinstance(action, Proceed):
                pending += proceed(self.core)

    # -- rules

    @rule(blocks=st.integers(1, 7), wait=st.booleans())
    def acquire(self, blocks: int, wait: bool) -> None:
        self.number += 1
        lease = self.number
        message = acquire(lease, blocks, first=1000 * lease, wait_for_room=wait)
        self.asked[lease] = Request(message)
        if blocks > self.total:
            self.expected[lease] = "NeverFits"
        elif self.may_get(blocks, list(self.queue)):
            self.held[lease] = blocks
            self.expected[lease] = "granted"
        elif wait:
            self.queue[lease] = blocks
            self.since[lease] = self.overtakings
        else:
            self.expected[lease] = "NoRoom"
        self.run(effects_of(self.core.acquire, message, self.asked[lease]))

    @precondition(lambda self: self.held)
    @rule(number=which, how=st.sampled_from(["finish", "preempt", "abandon"]))
    def end(self, number: int, how: str) -> None:
        lease = sorted(self.held)[number % len(self.held)]
        del self.held[lease]
        self.serve()
        endings = self.core
        if how == "finish":
            self.run(effects_of(endings.finish, Finish(lease, None), Request(Finish(lease))))
        elif how == "preempt":
            self.run(effects_of(endings.preempt, Preempt(lease, 0), Request(Finish(lease))))
        else:
            self.run(effects_of(endings.abandon, Abandon(lease)))

    @precondition(lambda self: self.queue)
    @rule(number=which, told=st.booleans())
    def give_up(self, number: int, told: bool) -> None:
        """The caller of a request that waits has gone, and may have sent nothing."""
        lease = sorted(self.queue)[number % len(self.queue)]
        del self.queue[lease]
        self.asked[lease].cancel()
        self.serve()
        self.expected[lease] = "LeaseEnded"
        if told:
            self.run(effects_of(self.core.abandon, Abandon(lease)))
        else:
            self.run(effects_of(self.core.abandon, Abandon(0)))

    @precondition(lambda self: self.queue)
    @rule(number=which)
    def expire(self, number: int) -> None:
        lease = sorted(self.queue)[number % len(self.queue)]
        del self.queue[lease]
        self.serve()
        self.expected[lease] = "DeadlineExceeded"
        self.run(effects_of(self.core.queue.expire, self.waits[lease]))

    @precondition(lambda self: self.held)
    @rule(number=which)
    def extend_is_not_held_up(self, number: int) -> None:
        """A running request gets free blocks before those that wait: else it could never end."""
        lease = sorted(self.held)[number % len(self.held)]
        if not self.free:
            return
        state = self.core.leases.get(lease)
        assert state is not None
        grown = Grow(self, lease)
        self.run(grown.actions)
        self.held[lease] += 1
        assert grown.granted

    @invariant()
    def alike(self) -> None:
        if not hasattr(self, "core"):
            return
        waiting = dict.fromkeys(self.queue)
        # A caller who has gone may be noticed later.
        expected = {
            lease: kind
            for lease, kind in self.expected.items()
            if kind != "LeaseEnded" or lease in self.found
        }
        assert self.found == expected
        space = self.core.queue.acquires
        there = [lease for lease, one in space.waits.items() if not one.envelope.abandoned]
        assert there == list(waiting), "the queue is not in the order of arrival"
        assert self.core.index.free == self.free
        assert not self.core.queue.waiting


class Grow:
    """An extend by one block."""

    def __init__(self, machine: QueueMachine, lease: int) -> None:
        state = machine.core.leases.get(lease)
        assert state is not None
        added = Path(BLOCK, state.path.root)
        added.extend([1] * BLOCK)
        self.envelope = Request(Extend(lease, state.path.num_tokens, added))
        self.envelope.deadline = 5.0
        message = self.envelope.message
        assert isinstance(message, Extend)
        self.actions = effects_of(machine.core.grow, message, self.envelope)
        self.granted = any(isinstance(one, Reply) for one in self.actions)


def test_the_queue_equals_its_model() -> None:
    run_state_machine_as_test(
        QueueMachine,
        settings=settings(
            max_examples=120, stateful_step_count=25, deadline=None, derandomize=True
        ),
    )


def proceed(state: Any) -> list[Any]:
    """The turn that continues with the requests that wait."""
    state.out.take()
    state.queue.proceed()
    state.admit_waiting()
    return state.out.take()


def ask(state: Any, message: Acquire) -> list[Any]:
    return effects_of(state.acquire, message, Request(message))


def test_not_now_and_never_are_different_errors() -> None:
    state = core(4)
    assert answers(ask(state, acquire(1, 3)))[0].blocks
    [later] = answers(ask(state, acquire(2, 2, first=100)))
    assert type(later) is NoRoom
    assert (later.needed, later.available) == (2, 1)
    for wait in (False, True):
        [never] = answers(ask(state, acquire(3, 5, first=200, wait_for_room=wait)))
        assert isinstance(never, NeverFits)
        assert (never.needed, never.available, never.total) == (5, 1, 4)
        assert "5 device blocks needed, 1 available" in str(never)
        assert "4 blocks in all" in str(never)
    assert state.index_statistics().no_room == 3
    assert "has 1 block in all" in str(NeverFits(2, 1, 1))
    assert str(NoRoom(1, 0)) == "1 device block needed, 0 available"


def test_a_deadline_names_the_sizes() -> None:
    state = core(4)
    ask(state, acquire(1, 3))
    [timer] = ask(state, acquire(2, 2, first=100, wait_for_room=True))
    [error] = answers(effects_of(state.queue.expire, timer.message.wait))  # type: ignore[union-attr]
    assert isinstance(error, DeadlineExceeded)
    assert "2 needed, 1 available" in str(error)
    assert timer.operation.timer is None  # type: ignore[union-attr]
