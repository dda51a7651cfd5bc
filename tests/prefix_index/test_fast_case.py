"""Requests that wait for nothing, and what they have in common with those that do."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvactors.cpu_evictor.messages import Load, Offloaded
from kvactors.errors import LeaseEnded, NoRoom, NotReady, RankLost
from kvactors.flush_notifier.messages import PathCached
from kvactors.hints import Hints
from kvactors.identity import PLAIN
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import (
    Ack,
    AcquireResult,
    Clear,
    Commit,
    Extend,
    Finish,
    Fork,
    Pause,
    Resume,
)
from kvactors.prefix_index.settings import TierPolicies
from kvactors.prefix_index.waiting import TURN_REQUESTS
from kvactors.prefix_index.work import NextSlice
from tests.prefix_index.objects import (
    BLOCK,
    Request,
    StartTimer,
    acquire,
    answers,
    cache,
    core,
    effects_of,
    path,
)


def alone(blocks: int = 8, **options: Any) -> PrefixIndex:
    """A device without other tiers and sinks."""
    return core(blocks, **{"host_tier": False, "announce": False, **options})


def ask(
    state: PrefixIndex, number: int, blocks: int, *, first: int = 0, **options: Any
) -> list[Any]:
    message = acquire(number, blocks, first=first, **options)
    message.path.set_root(state.roots.root(PLAIN))  # as callers make it
    return effects_of(state.acquire, message, Request(message))


def granted(state: PrefixIndex, number: int, blocks: int, **options: Any) -> AcquireResult:
    [reply] = answers(ask(state, number, blocks, **options))
    assert isinstance(reply, AcquireResult)
    return reply


def end(state: PrefixIndex, number: int, computed: int | None = None) -> list[Any]:
    return effects_of(state.finish, Finish(number, computed), Request())


def test_a_request_leaves_as_it_came():
    state = alone()
    cache(state, 2)
    assert granted(state, 1, 3).device_hits == 2
    assert state.index_statistics().leases == 1
    assert answers(effects_of(state.commit, Commit(1, 2 * BLOCK), Request()))[0].count == 2
    assert answers(end(state, 1))[0].count == 2
    assert len(state.leases) == 0
    assert isinstance(answers(end(state, 1))[0], LeaseEnded)
    assert (state.index.free, state.index.evictable()) == (6, 2)
    assert not list(state.check_steps())[1:]


def test_a_chunk_gets_blocks_for_its_tokens_only():
    assert len(granted(alone(), 1, 4, chunk_tokens=BLOCK).blocks) == 1


def test_a_media_item_is_cached_whole_or_not_at_all():
    state = alone()
    cache(state, 2)
    assert granted(state, 1, 4, media=((BLOCK, 2 * BLOCK),)).cached_tokens == BLOCK
    lease = state.leases.get(1)
    assert lease is not None
    assert not lease.changed, "it has the blocks that it was granted with"


def test_a_store_is_asked_for_blocks_that_it_may_have():
    state = alone(fetch=True)
    assert any(isinstance(one, Load) for one in ask(state, 1, 2))


def test_reserved_blocks_are_not_given_to_others():
    state = alone(4)
    state.index.reserved = 3
    assert isinstance(answers(ask(state, 1, 2))[0], NoRoom)


def test_a_request_that_leaves_too_few_blocks_free_evicts_ahead():
    state = alone(4, free_low=2, free_high=3)
    cache(state, 2)
    granted(state, 1, 1, first=100)
    assert state.index.free == 3


def test_the_hints_of_a_request_are_those_of_its_blocks():
    state, hints = alone(), Hints(priority=2)
    granted(state, 1, 2, hints=hints)
    lease = state.leases.get(1)
    assert lease is not None
    assert lease.hints is hints
    end(state, 1, 2 * BLOCK)
    assert state.index.tree.sharing, "the tree keeps hints"


@pytest.mark.parametrize(
    ("added", "output", "learned"), [(0, None, -1), (1, None, 1), (1, 5, 5), (0, 0, 0)]
)
def test_the_policy_learns_the_length_and_the_time_of_an_output(added, output, learned):
    state = alone(policy=TierPolicies("retain", clock=lambda: 7.0))
    granted(state, 1, 2)
    if added:
        more = path(0)
        more.extend([1] * added)
        state.grow(Extend(1, 2 * BLOCK, more), Request())
    lease, ends = state.leases.get(1), []

    class Tree:
        """Notes the arguments of `end`."""

        retired = sharing = False

        def end(self, *arguments: Any) -> list[int]:
            ends.append(arguments[1:])
            return []

    lease.tree = Tree()  # type: ignore[assignment]
    state.finish(Finish(1, None, output), Request())
    assert ends == [(learned, 7.0)]


def test_new_blocks_are_announced():
    state = alone(announce=True)
    granted(state, 1, 2)
    effects = effects_of(state.commit, Commit(1, 2 * BLOCK), Request())
    assert [type(one) for one in effects[:1]] == [PathCached]


def test_a_lease_that_cannot_be_used_commits_nothing():
    state = alone()
    granted(state, 1, 2)
    lease = state.leases.get(1)
    assert lease is not None
    lease.fault = partial(RankLost, "lost")
    [error] = answers(effects_of(state.commit, Commit(1, 2 * BLOCK), Request()))
    assert isinstance(error, RankLost)
    lease.fault, lease.loads = None, [None]  # type: ignore[list-item]
    [error] = answers(effects_of(state.commit, Commit(1, 2 * BLOCK), Request()))
    assert isinstance(error, NotReady)
    assert lease.path.num_committed == 0


def test_a_request_before_a_fork_that_waits_overtakes_it():
    state = alone(6)
    message = acquire(1, 1)
    message.path.extend([1])
    state.acquire(message, Request(message))
    granted(state, 2, 3, first=100)
    fork = Fork(1, BLOCK + 1, (3, 4), ("a", "b"), 9.0, True, True)
    [timer] = effects_of(state.fork, fork, Request(fork))
    assert isinstance(timer, StartTimer)
    granted(state, 5, 1, first=200)
    assert state.queue.overtakings == 1


def test_requests_of_a_pause_come_before_later_ones():
    state = alone(2 * TURN_REQUESTS)
    state.pause(Pause(), Request())
    for number in range(TURN_REQUESTS + 6):
        ask(state, number + 1, 1, first=100 * number)
    state.resume(Resume(), Request())
    assert len(state.queue.held) == 6
    assert answers(ask(state, 1000, 1, first=99_000)) == []


def test_a_pause_that_was_resumed_is_answered_when_no_transfer_is_in_flight():
    state = core(4)
    cache(state, 2)
    [offload] = effects_of(state.evictions.evict, 1)
    pause = Request()
    assert effects_of(state.pause, Pause(), pause) == []
    state.resume(Resume(), Request())
    granted(state, 1, 1, first=100)
    effects = effects_of(state.offloaded, Offloaded(offload.op, b"\1"))
    assert [one.value.count for one in effects if getattr(one, "envelope", None) is pause] == [0]


def test_memory_of_a_clear_is_returned_although_nobody_waits():
    state = alone()
    granted(state, 1, 2)
    end(state, 1, 2 * BLOCK)
    effects = effects_of(state.clear, Clear(), Request())
    assert [type(one) for one in effects if isinstance(one, NextSlice)] == [NextSlice]
    assert isinstance(answers(effects)[0], Ack)


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
