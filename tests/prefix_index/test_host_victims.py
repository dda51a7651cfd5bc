"""The victims of the host tier that the index names ahead of need."""

from __future__ import annotations

from typing import Any

from kvactors.cpu_evictor.messages import (
    EvictFirst,
    Offload,
    Offloaded,
    PrefetchToHost,
    Save,
    Saved,
)
from kvactors.prefix_index.messages import Finish, Prefetch
from kvactors.prefix_index.settings import TierPolicies
from kvactors.types import split_hashes
from tests.prefix_index.objects import BLOCK, Request, acquire, core, effects_of


def with_host(blocks: int, host: tuple[int, int], **settings: Any) -> Any:
    return core(
        blocks, host_blocks=host, policy=TierPolicies("lru", "retain", lambda: 0.0), **settings
    )


def serve(state: Any, number: int, blocks: int, *, first: int) -> list[Any]:
    """Serve a request to its end. The host tier keeps what it is offered. Returns the messages to
    it."""
    message = acquire(number, blocks, first=first)
    sent = host_messages(state, effects_of(state.acquire, message, Request(message)))
    return sent + host_messages(
        state, effects_of(state.finish, Finish(number, blocks * BLOCK), Request())
    )


def host_messages(state: Any, actions: list[Any]) -> list[Any]:
    """Answer each offload and save as complete. Returns all messages to the host tier."""
    sent = []
    for action in actions:
        if isinstance(action, Offload):
            sent += host_messages(
                state,
                effects_of(state.offloaded, Offloaded(action.op, bytes([1]) * len(action.blocks))),
            )
        elif isinstance(action, Save):
            sent += host_messages(
                state, effects_of(state.saved, Saved(action.op, bytes([1]) * len(action.blocks)))
            )
        if isinstance(action, EvictFirst | Offload | Save | PrefetchToHost):
            sent.append(action)
    return sent


def test_an_offload_to_a_full_host_tier_comes_with_victims():
    state = with_host(4, (4, 4))
    first = [serve(state, number, 4, first=100 * number) for number in range(2)]
    assert not victims(first[0] + first[1])
    sent = serve(state, 2, 4, first=200)
    assert [type(one) for one in sent] == [EvictFirst, Offload]
    # They are on the host until it reports.
    assert victims(sent) == offloaded(first[1])
    assert state.index.tree.statistics()["host"] == 8
    assert state.index.tree.host_kept(exclusive=True) == 4


def offloaded(sent: list[Any]) -> list[bytes]:
    """In the order of the offload: the deepest first."""
    return [
        one
        for message in sent
        if isinstance(message, Offload)
        for one in split_hashes(message.hashes)
    ]


def victims(sent: list[Any]) -> list[bytes]:
    return [
        one
        for message in sent
        if isinstance(message, EvictFirst)
        for one in split_hashes(message.hashes)
    ]


def test_a_save_comes_with_victims_for_what_the_host_lacks():
    state = with_host(8, (4, 4), exclusive=False)
    first = serve(state, 0, 4, first=0)
    again = serve(state, 0, 4, first=0)  # the host has all of it
    assert not victims(first + again)
    state.evictions.drop(8)  # only the host has them now
    sent = serve(state, 1, 2, first=100)
    assert [type(one) for one in sent] == [EvictFirst, Save]
    assert victims(sent) == split_hashes(first[0].hashes)[:-3:-1]


def test_a_prefetch_comes_with_victims():
    state = with_host(4, (4, 4))
    first = [serve(state, number, 4, first=100 * number) for number in range(2)]
    state.settings = state.settings._replace(fetch=True)
    message = Prefetch(acquire(9, 3, first=900).path, 60.0)
    sent = host_messages(state, effects_of(state.prefetch, message, Request(message)))
    assert [type(one) for one in sent] == [EvictFirst, PrefetchToHost]
    assert victims(sent) == offloaded(first[1])[:3]
