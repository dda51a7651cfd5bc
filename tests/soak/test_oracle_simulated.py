"""The oracle on a loop of virtual time, with and without inline turns: orders of steps that an idle
machine never has."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

import kvactors
from kvactors.actor.loop import InlineTurns, MailboxLoop
from kvactors.testing.loop import SimLoop, simulate
from tests.load.batch import Batch
from tests.load.client import Client
from tests.load.ground import Mix
from tests.oracle.draw import Draw, draw, share_nothing
from tests.oracle.history import History
from tests.oracle.record import Record
from tests.oracle.run import serve_round
from tests.oracle.world import World

pytestmark = pytest.mark.filterwarnings("ignore:lease of .* was never finished:ResourceWarning")


def drawn_for(seed: int, stores: tuple[str, ...] = ("none", "memory")) -> Draw:
    """A draw without threads and files."""
    drawn = draw(seed, "", store=stores[seed % len(stores)], threads=False, sinks=False)
    drawn.mix.forgotten = 0.0
    return drawn


def run(drawn: Draw, seed: int, direct: float, requests: int = 60) -> Record:
    """A round. Nothing is wrong."""
    record = Record()
    simulate(
        lambda: serve_round(drawn, History(), record, requests, inline=True),
        loop=SimLoop(seed, direct=direct),
    )
    assert (record.wrong, record.failures) == (0, [])
    return record


@pytest.mark.parametrize("direct", [0.0, 0.5, 1.0])
def test_rounds_find_nothing(direct):
    assert sum(run(drawn_for(seed), seed, direct, 40).finished for seed in range(3)) > 30


@pytest.mark.parametrize("direct", [0.5, 1.0])
def test_rounds_with_inline_turns_find_nothing(monkeypatch, direct):
    """Without a sink, and with few inline turns in a pass: asks wait for the next one."""
    reached = Counter()
    ask_later = InlineTurns._ask_later

    def counted(self, *arguments):
        found = ask_later(self, *arguments)
        reached["later"] += found is not None
        return found

    monkeypatch.setattr(InlineTurns, "_ask_later", counted)
    for seed in range(8):
        drawn = drawn_for(seed, ("none", "none", "none", "memory"))
        drawn.recorded, drawn.turns, drawn.clients = False, 1 + seed % 2, max(drawn.clients, 4)
        if seed % 4:
            share_nothing(drawn)
        run(drawn, seed, direct)
    assert reached["later"] > 5


@pytest.mark.parametrize("seed", [3, 4, 5])
def test_weights_that_change_in_the_step_of_a_grant(seed):
    """The engine computes with the weights of the admission, however late it gets the lease."""
    drawn = replace(drawn_for(3, ("none",)), mix=Mix(2, 4, scopes=0.5))
    drawn.tables["device"]["num_blocks"] = 64
    record = Record()

    async def main():
        config = kvactors.Config.from_mapping(drawn.tables)
        async with kvactors.open(config, inline_copies=True) as cache:
            world = World(cache, drawn, History(), record)
            clients = [Client(world, str(number), lambda: False) for number in range(4)]
            for _ in range(20):
                work = [Batch(client).run() for client in clients[1:]]
                await asyncio.gather(clients[0]._namespace(), *work, return_exceptions=True)
            await world.rest(clients[0].rng)

    simulate(main, loop=SimLoop(seed, direct=0.5))
    assert (record.wrong, record.failures) == (0, [])
    assert record.verified > 50


@pytest.mark.parametrize("seed", range(12))
def test_no_request_waits_for_blocks_that_nothing_will_free(seed, monkeypatch):
    """Looked at after every turn, while a fork owns blocks that its request evicts from the tree."""
    watched: list[World] = []
    handle, stuck = MailboxLoop.handle, list[int]()

    def look():
        for cache in (watched[0].cache, *watched[0].cache.groups.values()):
            waiting = cache.system.index_actor.queue.waiting
            if waiting and not cache.system.in_flight.count:
                stuck.append(len(waiting))

    def looked_at(self, envelope):
        handle(self, envelope)
        if watched:
            asyncio.get_running_loop().call_soon(look)

    class Watched(World):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            watched.append(self)

    monkeypatch.setattr(MailboxLoop, "handle", looked_at)
    monkeypatch.setattr("tests.oracle.run.World", Watched)
    drawn = drawn_for(seed, ("none", "memory", "memory"))
    drawn.mix.forks = 0.6
    assert run(drawn, seed, (0.5, 1.0)[seed % 2], 30).finished
    assert stuck == []
