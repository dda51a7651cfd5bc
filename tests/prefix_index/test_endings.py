"""Commits and Endings: the blocks that a lease leaves in the cache."""

from __future__ import annotations

import pytest

from kvactors.cpu_evictor.messages import DropHostCopies, Save, Saved
from kvactors.errors import LeaseEnded, NotReady, RankLost
from kvactors.flush_notifier.messages import PathCached
from kvactors.gpu_swapper.messages import DataPlaneStatus
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import Abandon, Commit, Extend, Finish, Preempt
from kvactors.prefix_index.work import NextSlice
from kvactors.types import Reason
from tests.prefix_index.objects import (
    BLOCK,
    Request,
    acquire,
    answers,
    cache,
    core,
    effects_of,
    messages,
    path,
    work_of,
)


def granted(state: PrefixIndex, number: int = 1, blocks: int = 3, *, first: int = 0):
    message = acquire(number, blocks, first=first)
    state.acquire(message, Request(message))
    lease = state.leases.get(number)
    assert lease is not None
    return lease


def test_full_blocks_of_computed_tokens_are_shareable():
    state = core()
    lease = granted(state)
    actions = effects_of(state.commit, Commit(1, 2 * BLOCK + 1), Request())
    assert answers(actions)[0].count == 2
    [announced] = messages(actions)
    assert isinstance(announced, PathCached)
    assert (announced.count, announced.reason) == (2, Reason.COMMIT)
    assert effects_of(state.commit, Commit(1, 2 * BLOCK), Request())[0] is not None
    assert lease.path.num_committed == 2


@pytest.mark.parametrize(("computed", "kind"), [(-1, ValueError), (7, ValueError)])
def test_bad_arguments_change_nothing(computed, kind):
    state = core()
    lease = granted(state)
    assert isinstance(answers(effects_of(state.commit, Commit(1, computed), Request()))[0], kind)
    assert isinstance(answers(effects_of(state.finish, Finish(1, computed), Request()))[0], kind)
    assert state.leases.get(1) is lease
    assert lease.path.num_committed == 0


def test_a_lease_that_waits_for_loads_or_has_failed_commits_nothing():
    state = core()
    cached = cache(state, 2)
    [offload] = effects_of(state.evictions.evict, 2)
    state.evictions.finish(offload.op, b"\1\1")
    lease = granted(state)
    assert cached.num_full_blocks == 2
    assert isinstance(answers(effects_of(state.commit, Commit(1, 1), Request()))[0], NotReady)
    state.data_plane_status(DataPlaneStatus(True, True, 1))
    assert isinstance(answers(effects_of(state.commit, Commit(1, 1), Request()))[0], RankLost)
    assert isinstance(answers(effects_of(state.commit, Commit(9, 1), Request()))[0], LeaseEnded)
    assert lease.path.num_committed == 0


def test_the_host_drops_its_copy_of_a_block_that_was_computed_again():
    state = core()
    granted(state, blocks=2)
    cache(state, 1)
    [offload] = effects_of(state.evictions.evict, 1)
    state.evictions.finish(offload.op, b"\1")
    actions = effects_of(state.commit, Commit(1, BLOCK), Request())
    assert [one.hashes for one in messages(actions) if isinstance(one, DropHostCopies)] == [
        offload.hashes
    ]


def test_a_finish_announces_saves_and_releases():
    state = core(exclusive=False)
    granted(state)
    actions = effects_of(state.finish, Finish(1, 3 * BLOCK), Request())
    kinds = [type(one) for one in messages(actions)]
    assert kinds == [PathCached, PathCached, Save], "the commit, the finish, the save"
    assert answers(actions)[0].count == 3
    assert state.index.evictable() == 0, "held until it is saved"
    admit = messages(actions)[-1]
    state.saved(Saved(admit.op, b"\1\1\1"))
    assert state.index.evictable() == 3
    assert not state.in_use()


def test_an_abandoned_lease_is_announced_and_not_saved():
    state = core(exclusive=False)
    granted(state)
    state.commit(Commit(1, 2 * BLOCK), Request())
    kinds = [type(one) for one in messages(effects_of(state.abandon, Abandon(1)))]
    assert kinds == [PathCached]
    assert (state.leases.abandoned, state.index.evictable(), state.index.free) == (1, 2, 6)
    assert effects_of(state.abandon, Abandon(1)) == []


def test_a_preempted_request_is_not_counted_again():
    state = core()
    granted(state)
    assert answers(effects_of(state.preempt, Preempt(1, BLOCK), Request()))[0].count == 1
    assert answers(effects_of(state.preempt, Preempt(1, BLOCK), Request()))[0].args
    granted(state)
    assert (state.leases.requests, state.leases.resumed, state.leases.preempted) == (1, 1, 1)


def test_an_end_refuses_the_waiting_asks_of_the_lease():
    state = core(4)
    granted(state)
    state.index.closing = 1
    others = state.index.take(1)
    added = path(1, first=50)
    assert answers(effects_of(state.grow, Extend(1, 3 * BLOCK, added), Request())) == []
    errors = answers(effects_of(state.finish, Finish(1, None), Request()))
    assert isinstance(errors[0], LeaseEnded)
    assert not state.queue.waiting
    assert state.index.free == 4 - len(others)


def test_a_long_lease_ends_in_parts():
    state = core(8, part=3, exclusive=False)
    granted(state, blocks=3)
    state.commit(Commit(1, 3 * BLOCK), Request())
    state.index.turn_blocks = 2
    actions = effects_of(state.finish, Finish(1, None), Request())
    turns = []
    while isinstance(actions[-1], NextSlice):
        turns.append([type(one) for one in actions[:-1]])
        actions = work_of(state.out, actions[-1].work)
    assert turns == [[PathCached], [PathCached], [Save]]
    assert answers(actions)[0].count == 3
    assert state.index.closing == 0
