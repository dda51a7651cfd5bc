"""The soak's engine on a loop of virtual time, with and without inline turns: orders of steps that
an idle machine never has."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter

import pytest

import kvactors
from kvactors import LeaseEnded
from kvactors.actor.loop import InlineTurns, MailboxLoop
from kvactors.prefix_index.work import TURN_BLOCKS
from kvactors.testing.loop import SimLoop, simulate
from tests.oracle.client import Client, Cut, Request
from tests.oracle.draw import draw, share_nothing
from tests.oracle.history import History
from tests.oracle.record import Record
from tests.oracle.run import serve_round
from tests.oracle.world import World

pytestmark = pytest.mark.filterwarnings("ignore:lease of .* was never finished:ResourceWarning")


def run(make, seed, direct):
    """The record of a coroutine function that is given one."""
    record = Record()
    simulate(lambda: make(record), loop=SimLoop(seed, direct=direct))
    return record


@pytest.mark.parametrize("direct", [0.0, 0.5, 1.0])
def test_rounds_find_nothing(direct):
    finished = 0
    for seed in range(3):
        drawn = draw(seed, "", store=("none", "memory")[seed % 2], threads=False, sinks=False)
        drawn.forgotten = 0.0
        record = run(
            lambda record, drawn=drawn: serve_round(drawn, History(), record, 40, inline=True),
            seed,
            direct,
        )
        assert (record.wrong, record.failures) == (0, [])
        finished += record.finished
    assert finished > 30


@pytest.mark.parametrize("direct", [0.5, 1.0])
def test_rounds_with_inline_turns_find_nothing(monkeypatch, direct):
    """Without a sink, and with few inline turns in a pass: asks wait for the next one."""
    reached = Counter()

    def counted(kind, name):
        inner = getattr(kind, name)

        def call(self, *arguments):
            found = inner(self, *arguments)
            reached[name] += found is not None
            return found

        monkeypatch.setattr(kind, name, call)

    counted(InlineTurns, "_ask_later")
    for seed in range(8):
        drawn = draw(seed, "", store=("none", "memory")[seed % 4 == 3], threads=False, sinks=False)
        drawn.forgotten, drawn.recorded, drawn.turns = 0.0, False, 1 + seed % 2
        drawn.clients, drawn.part = max(drawn.clients, 4), TURN_BLOCKS
        if seed % 4:
            share_nothing(drawn)
        record = run(
            lambda record, drawn=drawn: serve_round(drawn, History(), record, 60, inline=True),
            seed,
            direct,
        )
        assert (record.wrong, record.failures) == (0, [])
    assert reached["_ask_later"] > 5


def test_weights_that_change_in_the_step_of_a_grant():
    """The engine computes with the weights of the admission, however late it gets the lease."""

    async def main(record):
        drawn = draw(3, "", store="none", threads=False, sinks=False)
        drawn.cut = drawn.cancelled = drawn.forgotten = 0.0
        drawn.families, drawn.clients, drawn.longest = 2, 3, 4
        drawn.tables["device"]["num_blocks"] = 64
        config = kvactors.Config.from_mapping(drawn.tables)
        async with kvactors.open(config, inline_copies=True) as cache:
            world = World(cache, drawn, History(), record, random.Random(1))
            clients = [Client(world, number, [0]) for number in range(drawn.clients)]
            for number in range(20):
                await asyncio.gather(
                    world.pause(f"weights-{number % 3}"),
                    *(client.serve_one() for client in clients),
                )
            await world.rest()

    for seed in (3, 4, 5):
        record = run(main, seed, 0.5)
        assert (record.wrong, record.failures) == (0, [])
        assert record.verified > 50


def test_a_commit_that_ended_its_lease_ends_the_request():
    """The blocks of an ended lease are other requests': they are not looked at any more."""

    async def main(record):
        drawn = draw(3, "", store="none", threads=False, sinks=False)
        config = kvactors.Config.from_mapping(drawn.tables)
        async with kvactors.open(config, inline_copies=True) as cache:
            client = Client(World(cache, drawn, History(), record, random.Random(1)), 0, [0])
            request = Request(client, 1)
            await request._acquire()
            lease = request.lease

            async def cut(make):
                await make()
                lease.abandon()  # as a cancellation after the effect does
                raise Cut

            client.call = cut
            with pytest.raises(LeaseEnded):
                await request._commit()

    run(main, 1, 0.5)


def test_a_cancelled_request_keeps_nothing_while_its_client_goes_on():
    """Its exception refers to frames. A lease that came too late was kept by one of them, and the
    next change of weights waited for it."""
    kept, found = [], []

    class Late:
        """A result that came too late."""

    class Cancelled(Client):
        async def serve_one(self):
            if not kept:
                late = Late()
                kept.append(weakref.ref(late))
                self.world.drawn.cancelled = 0.0
                await asyncio.sleep(60.0)
            await asyncio.sleep(0.01)  # the loop refers to the callback that it runs
            gc.collect()
            found.append(kept[0]())

    async def main(record):
        drawn = draw(3, "", store="none", threads=False, sinks=False)
        drawn.cancelled = 1.0
        config = kvactors.Config.from_mapping(drawn.tables)
        async with kvactors.open(config, inline_copies=True) as cache:
            await Cancelled(World(cache, drawn, History(), record, random.Random(1)), 0, [2]).run()

    run(main, 1, 0.5)
    assert found == [None]


@pytest.mark.parametrize(("seed", "direct"), [(66, 0.5), (155, 1.0), (229, 0.5)])
def test_no_request_waits_for_blocks_that_nothing_will_free(seed, direct, monkeypatch):
    """Looked at after every turn, while a fork owns blocks that its request evicts from the tree."""
    watched: list[World] = []
    handle, stuck = MailboxLoop.handle, list[str]()

    def look():
        system = watched[0].cache.system
        if not system.in_flight.count:
            stuck.extend(one for one in watched[0].cache.check() if "wait for device blocks" in one)

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
    drawn = draw(seed, "", store=("none", "memory", "memory")[seed % 3], threads=False, sinks=False)
    drawn.forgotten = 0.0
    record = run(
        lambda record: serve_round(drawn, History(), record, 60, inline=True), seed, direct
    )
    assert (stuck, record.failures) == ([], [])
    assert record.finished
