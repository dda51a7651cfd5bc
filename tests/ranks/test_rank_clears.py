"""A clear that did not reach every rank, and a leader that stops in between: nothing from before is
held, and no object is of two generations."""

from __future__ import annotations

import asyncio

import pytest

import kvactors
from kvactors.data_plane.ranks.plane import RankStore
from kvactors.data_plane.ranks.protocol import RankAnswer, StoreObjects
from kvactors.errors import StoreUnavailable
from kvactors.settings import HostConfig
from kvactors.storage.backend import SlotViews
from kvactors.storage.messages import Outcome
from kvactors.testing.loop import simulate
from tests.ranks.manual import A, B, come, group_at, opened, settle, simulated
from tests.ranks.simulated import Rank, all_there, at_rest, prompt, serve, settings, stored


async def answer_clear(wire, outcome: int = Outcome.OK) -> int:
    message = await wire.receive()
    assert isinstance(message, StoreObjects)
    assert message.kind == "clear"
    wire.send(RankAnswer(message.op, bytes([outcome])))
    return message.generation


@simulated
async def test_ranks_of_different_generations_hold_nothing_until_all_are_cleared():
    group = group_at()
    store = RankStore(group, 64, 1.0, exclusive=False)
    opening = asyncio.ensure_future(group.open())
    await settle()
    wires = [await come(0, A + B, generation=5), await come(1, A + B, generation=6)]
    await opening
    assert store.clear_pending
    assert store.keys() == []
    assert store.probe([A]) == 0
    writing = asyncio.ensure_future(store.write([A], SlotViews(None, [0]), lambda: False))
    assert [await answer_clear(wire) for wire in wires] == [7, 7]
    for wire in wires:
        message = await wire.receive()
        assert message.kind == "write", "it is written after the clear"
        wire.send(RankAnswer(message.op, bytes([Outcome.OK])))
    assert (await writing).outcomes == bytes([Outcome.OK])
    assert not store.clear_pending
    assert store.keys() == [A]
    await group.close()


@simulated
async def test_a_clear_that_no_rank_confirms_raises_and_stays_to_be_done():
    async with opened(A, A) as (_, store, wires):
        clearing = asyncio.ensure_future(store.clear())
        for wire in wires:
            await answer_clear(wire, Outcome.UNAVAILABLE)
        with pytest.raises(StoreUnavailable, match=r"ranks \[0, 1\] of 2 did not confirm"):
            await clearing
        assert store.clear_pending
        assert store.keys() == []


@simulated
async def test_a_rank_that_was_away_during_a_clear_is_recognized_when_it_is_back():
    async with opened(A, A) as (group, store, wires):
        wires[1].close()
        await settle()
        clearing = asyncio.ensure_future(store.clear())
        assert await answer_clear(wires[0]) == 1
        await clearing
        assert store.clear_pending
        wires[1] = await come(1, A)
        assert store.keys() == []
        assert store.clear_pending
        again = asyncio.ensure_future(store.clear())
        assert [await answer_clear(wire) for wire in wires] == [2, 2]
        await again
        assert not store.clear_pending
        assert group.healthy


def test_a_leader_that_stops_before_all_ranks_have_cleared():
    """The next leader clears the others before anything can be hit or written."""

    async def main() -> None:
        host = HostConfig(slots=16, transit_slots=16, mode="inclusive")
        config = settings(storage=stored(write_policy="write_through"), host=host)
        ranks = [Rank(config, number) for number in range(2)]
        for rank in ranks:
            await rank.start()
        async with kvactors.open(config, inline_copies=True) as cache:
            await serve(cache, ranks, prompt(0, 3))
            await cache.wait_idle()
        assert [len(rank.store.keys()) for rank in ranks] == [3, 3]
        await ranks[0].store.clear(1)  # the leader stopped before it asked rank 1
        async with kvactors.open(config, inline_copies=True) as cache:
            await all_there(cache)
            lease, _ = await serve(cache, ranks, prompt(0, 3))
            assert lease.cached_tokens == 0
            await at_rest(cache)
            assert not cache.system.backend.clear_pending
        assert {rank.store.generation for rank in ranks} == {2}
        for rank in ranks:
            await rank.close()

    simulate(main)
