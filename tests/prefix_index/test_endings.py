"""Commits and Endings: the blocks that a lease leaves in the cache."""

from __future__ import annotations

import pytest

from kvactors.cpu_evictor.messages import DropHostCopies
from kvactors.errors import LeaseEnded
from kvactors.flush_notifier.messages import PathCached
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import Abandon, Commit, Extend, Finish
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
)


def granted(state: PrefixIndex, number: int = 1, blocks: int = 3, *, first: int = 0):
    message = acquire(number, blocks, first=first)
    state.acquire(message, Request(message))
    lease = state.leases.get(number)
    assert lease is not None
    return lease


@pytest.mark.parametrize(("computed", "kind"), [(-1, ValueError), (7, ValueError)])
def test_bad_arguments_change_nothing(computed, kind):
    state = core()
    lease = granted(state)
    assert isinstance(answers(effects_of(state.commit, Commit(1, computed), Request()))[0], kind)
    assert isinstance(answers(effects_of(state.finish, Finish(1, computed), Request()))[0], kind)
    assert state.leases.get(1) is lease
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


def test_an_abandoned_lease_is_announced_and_not_saved():
    state = core(exclusive=False)
    granted(state)
    state.commit(Commit(1, 2 * BLOCK), Request())
    kinds = [type(one) for one in messages(effects_of(state.abandon, Abandon(1)))]
    assert kinds == [PathCached]
    assert (state.leases.abandoned, state.index.evictable(), state.index.free) == (1, 2, 6)
    assert effects_of(state.abandon, Abandon(1)) == []


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
