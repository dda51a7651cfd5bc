"""Message traces: the same seed gives the same bytes, and one request's messages can be separated
from the others'."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

import kvactors
from kvactors.actor import (
    Actor,
    ActorRef,
    ActorSpec,
    Ask,
    Channel,
    Control,
    Group,
    InFlight,
    Message,
    Supervisor,
    on,
)
from kvactors.data_plane.base import Direction
from kvactors.errors import ActorFailed, DeadlineExceeded
from kvactors.gpu_swapper.messages import CopyFinished
from kvactors.testing import Sim, Trace, minimal, render, simulate
from kvactors.testing.trace import describe
from tests.support.deadline import deadline_after

BLOCK = 8


def prompt(family, tokens=5 * BLOCK):
    return [1000 * family + i for i in range(tokens)]


async def traffic(sim, **options):
    """A few clients in a cache that is too small for them, with injected faults. Returns each one's
    observations, in order."""
    seen = []
    async with sim.open(device={"num_blocks": 16}, host={"slots": 16}, **options) as cache:
        sim.faults.plan(sim.faults.draw(4))

        async def client(number):
            for turn in range(4):
                await anyio.sleep(sim.random.random() * 0.01)
                try:
                    lease = await cache.acquire(
                        f"r{number}.{turn}", prompt(sim.random.randrange(5))
                    )
                except kvactors.NoRoom:
                    seen.append((number, "no room"))
                    continue
                async with lease:
                    await lease.wait_ready()
                    seen.append((number, tuple(lease.hits), lease.block_table))
                    cached = lease.cached_tokens // BLOCK
                    cache.device.fill(lease.block_table[cached:], lease.hashes(cached, 5))
                    await lease.commit(lease.num_tokens)

        async with anyio.create_task_group() as tasks:
            for number in range(4):
                tasks.start_soon(client, number)
    return seen


def traced(seed):
    sim = Sim(seed)
    return sim.run(traffic, sim), str(sim.trace)


def test_the_same_seed_gives_the_same_bytes_and_another_seed_another_story():
    first, again, other = traced(3), traced(3), traced(4)
    assert first == again
    assert len(first[1].splitlines()) > 100
    assert first[1] != other[1]


def test_another_process_with_other_hashes_and_addresses_sends_the_same():
    command = (
        "import sys; sys.path.insert(0, sys.argv[1]); import tests.testing.test_message_trace as t; "
        "print(t.traced(3)[1])"
    )
    environment = {
        **os.environ,
        "PYTHONHASHSEED": "77",
        "PYTHONPATH": str(Path(kvactors.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", command, str(Path(__file__).parents[2])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (
        done.stdout.strip().splitlines()[-len(traced(3)[1].splitlines()) :]
        == traced(3)[1].strip().splitlines()
    )


def test_a_trace_of_one_request_has_all_its_messages_and_few_others():
    async def main(sim):
        async with sim.open(device={"num_blocks": 6}, host={"slots": 0}) as cache:
            for name, family in (("first", 1), ("other", 2), ("again", 1)):
                async with await cache.acquire(name, prompt(family)) as lease:
                    await lease.wait_ready()
                    if name != "again":
                        cache.device.fill(lease.block_table, lease.hashes(0, 5))
                    await lease.commit(lease.num_tokens)
                await cache.wait_idle()

    sim = Sim(0)
    sim.run(main, sim)
    records = minimal(sim.trace, request="again")
    kinds = [record.kind for record in records]
    for kind in (
        "Acquire",
        "Load",
        "ProbeStore",
        "Probed",
        "Read",
        "ReadDone",
        "Copy",
        "Copied",
        "Loaded",
        "Ready",
        "Commit",
        "Finish",
    ):
        assert kind in kinds, f"{kind} is missing:\n{render(records)}"
    assert not {"request_id=first", "request_id=other"} & set(render(records).split())
    assert len(records) < sim.trace.count / 2
    load = next(record for record in records if record.kind == "Load")
    acquire = next(record for record in records if record.kind == "Acquire")
    assert load.cause == acquire.number


# -- a channel alone


class Note(Message, frozen=True, eq=False):
    keys: bytes
    blocks: tuple[int, ...]
    payload: bytes


class Question(Ask[int], frozen=True, eq=False):
    op: int


class Begin(Message, frozen=True, eq=False):
    op: int


class Order(Control, frozen=True, eq=False):
    op: int


def make_ref(trace, name="actor", bound=16):
    ref = ActorRef(name, name, Channel(name, bound), InFlight())
    ref.instruments.add(trace)
    return ref


def test_the_ring_keeps_the_last_and_counts_all():
    async def main():
        trace = Trace(limit=3)
        ref = make_ref(trace)
        for number in range(8):
            ref.try_tell(Order(number))
        assert trace.count == 8
        assert [record.fields for record in trace.records] == ["op=5", "op=6", "op=7"]
        for number in range(8):
            ref.try_tell(Begin(number))
        assert len(trace._owners) == 3

    simulate(main)


def test_asks_that_end_otherwise_are_distinguished():
    async def main():
        trace = Trace()
        ref = make_ref(trace)

        async def ask(number):
            await ref.ask(Question(number), deadline=deadline_after(1))

        tasks = [asyncio.create_task(ask(number)) for number in range(4)]
        await asyncio.sleep(0.1)
        envelopes = {envelope.message.op: envelope for envelope in ref.channel.purge()}
        ref.reply(envelopes[0], 7)
        ref.reply_error(envelopes[1], kvactors.NoRoom(2, 1))
        tasks[2].cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in done] == [
            type(None),
            kvactors.NoRoom,
            asyncio.CancelledError,
            DeadlineExceeded,
        ]
        told = sorted(
            (record.kind, re.sub(r"#\d+", "#", record.fields))
            for record in trace.records
            if record.kind != "Question"
        )
        assert told == [
            ("answer", "# Question: 7"),
            ("expired", "# Question"),
            ("refusal", "# Question: NoRoom: 2 device blocks needed, 1 available"),
            ("withdrawn", "# Question"),
        ]

    simulate(main)


class Boom(Control, frozen=True, eq=False):
    pass


class Silent(Actor):
    ROLE = "silent"

    @on(Question)
    def question(self, message, envelope):
        pass

    @on(Boom)
    def boom(self, message):
        raise RuntimeError("boom")


@pytest.mark.parametrize("dies", [True, False])
def test_asks_that_end_at_once_are_listed_in_one_order_however_the_core_ends_them(dies):
    def told(waste):
        trace, _objects = Trace(), [object() for _ in range(waste)]

        async def main():
            supervisor = Supervisor(InFlight())
            ref = supervisor.make_ref(Silent, 64)
            ref.instruments.add(trace)
            async with supervisor.running(Group("all", (ActorSpec(Silent, Silent, ref),))):
                asks = [
                    asyncio.create_task(ref.ask(Question(i), deadline=deadline_after(1)))
                    for i in range(20)
                ]
                await asyncio.sleep(0.1)
                if dies:
                    ref.try_tell(Boom())
                ends = await asyncio.gather(*asks, return_exceptions=True)
                assert {type(end) for end in ends} == {ActorFailed if dies else DeadlineExceeded}

        simulate(main, 1)
        return str(trace)

    assert len({told(waste) for waste in range(0, 60, 7)}) == 1
    assert told(0).count("refusal" if dies else "expired") == 20


def test_words_of_values():
    note = Note(bytes(range(64)), (1, 2, 3, 4, 5, 6), b"12345")
    assert describe(note) == "Note(keys=2:00010203 blocks=[1,..6] payload=5B)"
    assert describe(Note(b"", (1, 2), b"")) == "Note(keys=0 blocks=[1,2] payload=0B)"
    assert describe(object()) == "<object>"
    assert (
        describe(CopyFinished(7, Direction.TO_HOST, (), 2, 0.123))
        == "CopyFinished(op=7 direction=to_host failed=[] pairs=2)"
    )
    assert describe(InFlight()) == "<InFlight>"
