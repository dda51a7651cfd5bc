"""Grants and Requests: how a request gets its device blocks, or why not."""

from __future__ import annotations

import pytest

from kvactors.cpu_evictor.messages import Cancel, Load, Offload, Offloaded
from kvactors.errors import LeaseEnded, NoRoom
from kvactors.identity import PLAIN
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import Abandon, AcquireResult, SetNamespace
from tests.prefix_index.objects import (
    BLOCK,
    Request,
    acquire,
    answers,
    cache,
    core,
    effects_of,
    messages,
)


def request(state: PrefixIndex, number: int, blocks: int, *, first: int = 0, **options):
    """The request, and the actions of its turn."""
    message = acquire(number, blocks, first=first, **options)
    envelope = Request(message)
    return envelope, effects_of(state.acquire, message, envelope)


def test_refused_requests_that_try_again_in_turn_are_all_granted():
    """None of them keeps the blocks that leave for another, however slow the copies are."""
    state = core(4)
    for family in (0, 100):
        cache(state, 2, first=family)
    granted, in_flight, numbers = set(), [], iter(range(1, 1000))
    for _ in range(3):
        for _ in range(5):  # tries of each while a copy is made
            for family in (0, 100, 200):
                number = next(numbers)
                _, actions = request(state, number, 4, first=family, wait=False)
                in_flight += [one for one in messages(actions) if isinstance(one, Offload)]
                if isinstance(answers(actions)[0], AcquireResult):
                    granted.add(family)
                    state.abandon(Abandon(number))
        while in_flight:
            offload = in_flight.pop(0)
            state.offloaded(Offloaded(offload.op, bytes(len(offload.blocks))))
    assert granted == {0, 100, 200}
    assert state.index_statistics().rescued == 0


def test_a_refused_request_counts_no_hit_and_sends_no_load():
    state = core(4)
    cached = cache(state, 2)
    [offload] = effects_of(state.evictions.evict, 1)  # the second block is on the host
    state.evictions.finish(offload.op, b"\1")
    cache(state, 2, first=100)
    sent = []
    for number in range(1, 5):
        _, actions = request(state, number, 3, wait=False)
        assert isinstance(answers(actions)[0], NoRoom)
        sent += messages(actions)
    assert [type(one) for one in sent] == [Offload], "an eviction for the next try, and no load"
    tree = state.index.tree
    cached.set_root(state.roots.root(PLAIN))
    tree.pin(cached)
    uses = [tree.worth_saving(cached, 0, 1, hits) for hits in (2, 3)]
    assert uses == [[0], []], "that which computed it, and that of this path"


@pytest.mark.parametrize("free", [0, 1])
def test_a_granted_or_waiting_request_keeps_what_was_leaving(free):
    state = core(4 + free)
    cache(state, 2)
    cache(state, 2, first=100)
    [offload] = effects_of(state.evictions.evict, 2)
    _, actions = request(state, 1, 3)
    assert len(answers(actions)) == free
    while offload is not None:
        done = effects_of(state.offloaded, Offloaded(offload.op, bytes(len(offload.blocks))))
        offload = next((one for one in messages(done) if isinstance(one, Offload)), None)
        actions += done
    [granted] = answers(actions)
    assert (granted.cached_tokens, state.index_statistics().rescued) == (2 * BLOCK, 2)


def waiting_with_a_load(state: PrefixIndex) -> tuple[Request, Load, Offload]:
    """Two blocks on the host. A request of four waits for an eviction, its load sent ahead."""
    cache(state, 2)
    [offload] = effects_of(state.evictions.evict, 2)
    state.evictions.finish(offload.op, b"\1\1")
    cache(state, 4, first=100)
    envelope, actions = request(state, 1, 4)
    [load, offload] = messages(actions)
    assert answers(actions) == []
    assert load.blocks == ()
    return envelope, load, offload


def test_a_request_that_waited_is_matched_again_under_the_present_namespace():
    state = core(4)
    envelope, load, offload = waiting_with_a_load(state)
    state.set_namespace(SetNamespace("b"), Request())
    actions = effects_of(state.offloaded, Offloaded(offload.op, bytes(4)))
    assert [one.op for one in messages(actions) if isinstance(one, Cancel)] == [load.op]
    [granted] = answers(actions)
    assert (granted.pending, granted.cached_tokens) == (False, 0)
    lease = state.leases.get(1)
    assert lease is not None
    assert lease.path.root == state.roots.root(envelope.message.scope)


def test_a_waiting_request_that_is_given_up_cancels_its_load():
    state = core(4)
    _, load, _ = waiting_with_a_load(state)
    actions = effects_of(state.abandon, Abandon(1))
    assert [one.op for one in messages(actions) if isinstance(one, Cancel)] == [load.op]
    assert isinstance(answers(actions)[0], LeaseEnded)
    assert not state.loads
