"""Grants and Requests: how a request gets its device blocks, or why not."""

from __future__ import annotations

import pytest

from kvactors.cpu_evictor.messages import Cancel, Load, Offload, Offloaded, SetTargets
from kvactors.errors import LeaseBusy, LeaseEnded, NoRoom, Paused
from kvactors.identity import PLAIN
from kvactors.prefix_index.actor import PrefixIndex
from kvactors.prefix_index.messages import (
    Abandon,
    AcquireResult,
    AdmissionDeadline,
    Extend,
    Pause,
    Resume,
    SetNamespace,
)
from tests.prefix_index.objects import (
    BLOCK,
    Request,
    StartTimer,
    acquire,
    answers,
    cache,
    core,
    effects_of,
    messages,
    path,
)


def request(state: PrefixIndex, number: int, blocks: int, *, first: int = 0, **options):
    """The request, and the actions of its turn."""
    message = acquire(number, blocks, first=first, **options)
    envelope = Request(message)
    return envelope, effects_of(state.acquire, message, envelope)


def extend(state: PrefixIndex, number: int, position: int, tokens: int):
    added = path(0)
    added.extend([7] * tokens)
    envelope = Request()
    return envelope, effects_of(state.grow, Extend(number, position, added), envelope)


def test_a_prefix_on_the_device_is_hit():
    state = core(8)
    cached = cache(state, 2)
    _, actions = request(state, 1, 3)
    [granted] = answers(actions)
    assert isinstance(granted, AcquireResult)
    assert (granted.cached_tokens, granted.pending, granted.device_hits) == (2 * BLOCK, False, 2)
    assert len(set(granted.blocks)) == 3
    assert state.index.free == 8 - 3
    assert state.leases.get(1) is not None
    assert cached.num_full_blocks == 2


def test_blocks_of_the_host_are_loaded_behind_the_answer():
    state = core(8)
    cached = cache(state, 2)
    [offload] = effects_of(state.evictions.evict, 2)
    state.evictions.finish(offload.op, b"\1\1")
    _, actions = request(state, 1, 3)
    [granted] = answers(actions)
    assert (granted.pending, granted.cached_tokens) == (True, 2 * BLOCK)
    [load] = messages(actions)
    assert isinstance(load, Load)
    assert load.blocks == tuple(granted.blocks[:2])
    assert load.hashes == cached.hashes(0, 2)


def test_without_free_blocks_the_request_is_refused_and_nothing_changes():
    state = core(2)
    _, actions = request(state, 1, 3)
    [error] = answers(actions)
    assert isinstance(error, NoRoom)
    assert (state.index.free, len(state.loads), len(state.leases)) == (2, 0, 0)
    assert state.index_statistics().no_room == 1
    assert not state.in_use()


def test_the_caller_of_a_grant_that_has_gone_keeps_nothing():
    state = core(4)
    message = acquire(1, 2)
    envelope = Request(message)
    envelope.cancel()
    state.acquire(message, envelope)
    assert (state.index.free, len(state.leases)) == (4, 0)


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


def test_a_load_sent_ahead_is_placed_when_the_request_has_its_blocks():
    state = core(4)
    _, load, offload = waiting_with_a_load(state)
    actions = effects_of(state.offloaded, Offloaded(offload.op, bytes(4)))
    [place] = [one for one in messages(actions) if isinstance(one, SetTargets)]
    [granted] = answers(actions)
    assert (place.op, place.blocks) == (load.op, tuple(granted.blocks[:2]))
    assert granted.pending


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


def test_an_extend_in_the_wrong_place_or_during_another_is_refused():
    state = core(4)
    request(state, 1, 2)
    [error] = answers(extend(state, 1, 99, 1)[1])
    assert isinstance(error, LeaseBusy)
    state.index.closing = 1  # blocks are on their way back
    state.index.take(1)
    first, actions = extend(state, 1, 2 * BLOCK, 2 * BLOCK)
    assert [type(one) for one in actions] == [StartTimer]
    [error] = answers(extend(state, 1, 2 * BLOCK, 1)[1])
    assert isinstance(error, LeaseBusy)
    first.cancel()
    _, actions = extend(state, 1, 2 * BLOCK, BLOCK)
    cancelled, granted = answers(actions)
    assert isinstance(cancelled, LeaseEnded)
    assert len(granted.blocks) == 1


def test_tokens_within_the_last_block_need_none():
    state = core(4)
    message = acquire(1, 1)
    message.path.extend([1])
    state.acquire(message, Request(message))
    [granted] = answers(extend(state, 1, BLOCK + 1, 1)[1])
    assert granted.blocks == ()
    assert isinstance(answers(extend(state, 2, 0, 1)[1])[0], LeaseEnded)


def test_requests_of_a_pause_are_admitted_in_order_after_it():
    state = core(4)
    state.pause(Pause(), Request())
    _, first = request(state, 1, 3)
    _, second = request(state, 2, 3, first=100)
    assert [type(one) for one in first + second] == [StartTimer] * 2
    expired = second[0].message
    assert isinstance(expired, AdmissionDeadline)
    [error] = answers(effects_of(state.queue.expire, expired.lease, expired.ticket))
    assert isinstance(error, Paused)
    resume = Request()
    done, granted = answers(effects_of(state.resume, Resume(), resume))
    assert (done.count, len(granted.blocks)) == (1, 3)
